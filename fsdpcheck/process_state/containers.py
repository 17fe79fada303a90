"""Containers: dicts, lists and sets of the process that are changed in place, read as copies.

Generated: what modules of torch call hooks. Beside them what Python and torch keep in a list or dict of another name.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

from fsdpcheck.compat import torch_private
from fsdpcheck.process_state.settings import Scope, Setting

_HOOKED: Final = ("torch.nn.modules.module", "torch.optim.optimizer")
"""Modules of which each rank has the hooks that it registered: swapped at each hand-over of the baton."""


def table() -> Iterator[Setting]:
    """A setting for each container, of modules that are loaded now."""
    for name, module in sys.modules.copy().items():
        if name.startswith("torch.") and isinstance(module, ModuleType):
            scope: Scope = "rank" if name in _HOOKED else "process"
            for attribute in hooks_of(module):
                yield _setting(f"{name}.{attribute}", functools.partial(getattr, module, attribute), scope)
    yield Setting("DTensor's operator handlers", *torch_private.own_dtensor_handlers(), "rank")
    yield _setting("FSDP1's SimpleProfiler.profiling", torch_private.fsdp1_profiling, "rank")
    for attribute in ("path", "meta_path", "path_hooks", "warnoptions"):
        yield _setting(f"sys.{attribute}", functools.partial(getattr, sys, attribute), "process")
    yield _setting("gc.callbacks", lambda: gc.callbacks, "process")


def hooks_of(module: ModuleType) -> list[str]:
    """Names of a module's containers of hooks."""
    return [n for n, v in vars(module).items() if "hook" in n.lower() and isinstance(v, dict | list | set)]


def _setting(name: str, container: Callable[[], Any], scope: Scope) -> Setting:
    return Setting(name, lambda: container().copy(), lambda value: fill(container(), value), scope)


def fill(container: Any, value: Any) -> None:
    """Give ``container`` the entries of ``value``, in place."""
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(value)
