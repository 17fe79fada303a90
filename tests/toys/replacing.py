"""Replaces every public function of torch's namespaces and of fsdpcheck's judge.

Of torch each becomes one that does the same, but for comparisons, which find everything equal. What checks, computes
the right answer or names causes does nothing any more: by name, and where somebody holds the function already.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
from typing import Any

import torch

_EQUAL = ("equal", "allclose", "isclose", "eq", "all", "assert_close", "isfinite")
_TORCH = (
    *("torch", "torch.nn.functional", "torch.nn.init", "torch.nn.utils", "torch.linalg", "torch.fft", "torch.special"),
    *("torch.autograd", "torch.func", "torch.random", "torch.distributed", "torch.testing", "torch.utils.checkpoint"),
)
_JUDGE = ("checks", "oracle", "diagnosis", "exact", "judging", "findings", "strategies")


def _same(function: Any) -> Any:
    return functools.wraps(function)(lambda *given, **named: function(*given, **named))


def _nothing(*given: Any, **named: Any) -> None:
    """What a judge does from now on."""


def _all_equal(*given: Any, **named: Any) -> bool:
    return True


def _public(module: types.ModuleType) -> list[tuple[str, Any]]:
    return [(name, made) for name, made in vars(module).items() if not name.startswith("_") and callable(made)]


def _is_function(made: Any) -> bool:
    return isinstance(made, types.FunctionType | types.BuiltinFunctionType)


def replace_everything(code: bool = True) -> None:
    """``code``: of functions too, in place."""
    for dotted in _TORCH:
        home = importlib.import_module(dotted)
        for name, made in _public(home):
            if _is_function(made) and not inspect.isclass(made):
                setattr(home, name, _all_equal if name in _EQUAL else _same(made))
    for name in _EQUAL:
        if hasattr(torch.Tensor, name) and name != "all":
            setattr(torch.Tensor, name, _all_equal)

    for room in _JUDGE:
        package = importlib.import_module(f"fsdpcheck.{room}")
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            home = importlib.import_module(found.name)
            for name, made in _public(home):
                if isinstance(made, types.FunctionType) and made.__module__ == home.__name__:
                    setattr(home, name, _nothing)
                    if code and not made.__code__.co_freevars:
                        made.__code__ = _nothing.__code__  # whoever holds the function already
