"""Messages between processes: plain data as bytes, with tensors as their bits.

What is read back can be nothing but plain data: values of Python's own kinds, tensors, and instances of classes of
fsdpcheck. So a process that reads the message of another imports none of the other's code.
"""

from __future__ import annotations

import builtins
import importlib
import io
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import PosixPath, WindowsPath
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdpcheck.errors import NotPlain, excerpt, qualified

_OURS: Final = "fsdpcheck."
_NOT_OURS: Final = ("fsdpcheck.impl", "fsdpcheck.properties", "fsdpcheck.adapters.builtin")
"""What is judged, and what judges by it: no message holds anything of it."""
_PLAIN: Final = frozenset({
    *(getattr(builtins, name) for name in ("set", "frozenset", "slice", "complex", "range", "bytearray")),
    Fraction, PosixPath, WindowsPath, torch.Size,
})  # fmt: skip
_KNOWN: Final = {(kind.__module__, kind.__qualname__): kind for kind in _PLAIN}


def dumps(message: object) -> bytes:
    """``message`` as bytes. Raises NotPlain, naming what does not travel."""
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise NotPlain(f"it cannot be sent to another process: {error}") from error
    return file.getvalue()


def loads(data: bytes) -> Any:
    """The inverse of ``dumps``. Raises NotPlain for what ``dumps`` never writes."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:
        raise NotPlain(f"it is no message: {excerpt.kind(error)}: {excerpt.said(error)}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind in (Tensor, nn.Parameter):
            return _tensor, _bits(value)
        if kind is torch.dtype:
            return _dtype, (str(value).removeprefix("torch."),)
        if value is _tensor or value is _dtype or (isinstance(value, type) and _is_known(value)):
            return NotImplemented
        if isinstance(value, type) or not _is_known(kind):
            name = qualified(value if isinstance(value, type) else kind)
            raise NotPlain(f"got an object of {name}, wanted numbers, strings, tensors and tuples of them")
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == __name__ and name in _REBUILT:
            return _REBUILT[name]
        if _is_ours(module):
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
            if isinstance(found, type):
                return found
        raise NotPlain(f"a message names {module}.{name}, which is no plain data")


def _is_known(kind: type) -> bool:
    return kind in _PLAIN or _is_ours(kind.__module__)


def _is_ours(module: str) -> bool:
    return module.startswith(_OURS) and not module.startswith(_NOT_OURS)


def _bits(value: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """What ``_tensor`` takes; of a tensor on another device too."""
    if value.layout != torch.strided or value.device.type == "meta":
        raise NotPlain(f"got a tensor of layout {value.layout} on {value.device}, wanted values in memory")
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    flat = flat.clone(memory_format=torch.contiguous_format)  # one element may have any stride
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), data


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Tensor:
    kind = getattr(torch, dtype)
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape)


def _dtype(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


_REBUILT: Final[dict[str, Callable[..., Any]]] = {"_tensor": _tensor, "_dtype": _dtype}
