"""What a rank trains on: hashes of the rows that its outermost forwards and its loss functions are given."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fsdpcheck.comparison.observation.parameter_names import unwrapped
from fsdpcheck.comparison.observation.rank_log import Batch, RankLog
from fsdpcheck.compat import frames_private, layouts_private
from fsdpcheck.compat.torch_private import is_dtensor, is_in_backward

_OUTPUTS: Final = 64
"""How many tensors that modules have returned are known again where they are given to others."""
_LARGEST: Final = 2**20
"""Numbers of such a tensor up to which its rows are, too, where others hold them: a batch of real and made ones."""


class Batches:
    """Hooks on every module of a rank. A forward that no other module calls, of a module with parameters, is outermost.

    Only forwards with gradients are training. An input that a module has computed is no data.
    """

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._inside: list[nn.Module] = []
        self._is_model: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._computed_rows: deque[frozenset[str]] = deque(maxlen=_OUTPUTS)
        self._trained: WeakSet[nn.Module] = WeakSet()
        self._computed: deque[Any] = deque(maxlen=_OUTPUTS)
        self._in_loss = False
        self.at_first_forward: Callable[[nn.Module], object] = lambda root: None
        """Called with each root module before its first forward with gradients."""

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called."""
        if self._inside:
            if module is self._inside[0]:
                self._inside.append(module)
            return
        if is_in_backward() or not self._has_parameters(module):
            return
        self._inside.append(module)
        self._log.names.see(module, frames_private.stage_called(sys._getframe()))
        if torch.is_grad_enabled() and not frames_private.is_called_for_shapes(sys._getframe()):
            if module not in self._trained and not layouts_private.is_transformed():
                self._trained.add(module)
                self.at_first_forward(module)
            kwargs = frames_private.keywords_of_call(sys._getframe())
            batch = Batch(module)
            for name, tensor in _tensors(_bound(module, args, kwargs)):
                data = self._data(tensor, f"input {name} of {type(unwrapped(module)).__name__}")
                if data is not None:
                    batch.rows[name] = rows(data)
                    batch.add(name, elements(data))
            self._log.batches.setdefault(self._log.step, []).append(batch)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """It has returned, or raised."""
        if not self._inside or module is not self._inside[0]:
            return
        self._inside.pop()
        if not self._inside:
            for _, tensor in _tensors({"": output}):
                tensor = layouts_private.untransformed(tensor)
                if tensor.layout is torch.strided and not is_dtensor(tensor):
                    self._remember(tensor)

    def in_loss(self, target: object) -> bool:
        """A loss function begins, given this target; whether it is the outermost."""
        if self._in_loss or is_in_backward() or not torch.is_grad_enabled():
            return False
        self._in_loss = True
        batches = self._log.batches.get(self._log.step)
        if batches and isinstance(target, Tensor):
            data = self._data(target, "the target of a loss")
            if data is not None:
                batches[-1].labels.extend(rows(data))
                batches[-1].add("", elements(data))
        return True

    def out_of_loss(self) -> None:
        """The outermost loss function has ended."""
        self._in_loss = False

    def _remember(self, output: Tensor) -> None:
        """A module has returned it."""
        self._computed.append(cast(Any, StorageWeakRef)(output.untyped_storage()))
        is_small = output.ndim > 1 and output.numel() <= _LARGEST and not output.is_meta
        if output.is_floating_point() and is_small and output.numel() > len(output):
            with layouts_private.aside():
                self._computed_rows.append(frozenset(rows(numbers(output))))

    def _has_parameters(self, module: nn.Module) -> bool:
        known = self._is_model.get(module)
        if known is None:
            known = self._is_model[module] = next(module.parameters(), None) is not None
        return known

    def _data(self, tensor: Tensor, what: str) -> numpy.ndarray[Any, Any] | None:
        """Its numbers; None where the tensor is no data, or not known to be."""
        tensor = layouts_private.untransformed(tensor)
        if tensor.requires_grad or self._is_computed(tensor):
            return None
        if is_dtensor(tensor) or tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta:
            self._log.note(f"rows of {what} are not compared: it is a {type(tensor).__name__} of {tensor.layout}")
            return None
        with layouts_private.aside():
            values = numbers(tensor)
            if values.ndim > 1 and values.dtype.kind == "f":
                kept = [not any(row in computed for computed in self._computed_rows) for row in rows(values)]
                values = values if all(kept) else values[numpy.array(kept)]
            return values if values.size or not tensor.numel() else None

    def _is_computed(self, tensor: Tensor) -> bool:
        """Whether it lies in what a module has returned."""
        if tensor.layout is not torch.strided or is_dtensor(tensor):
            return False
        storage = tensor.untyped_storage()._cdata
        return any(known.cdata == storage and not known.expired() for known in self._computed)


def numbers(tensor: Tensor) -> numpy.ndarray[Any, Any]:
    """Its values as float32 if that is what they are exactly, float64, int64 or bool."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor if tensor.dtype is torch.float64 else tensor.to(torch.float32)
    elif tensor.dtype is not torch.bool and not tensor.is_complex():
        tensor = tensor.to(torch.int64)
    return tensor.resolve_conj().resolve_neg().contiguous().numpy()


def rows(values: numpy.ndarray[Any, Any]) -> tuple[str, ...]:
    """Of each entry of the first dimension a hash, equal for equal values; a number is its own."""
    if values.size == (len(values) if values.ndim else 1):
        return tuple(map(repr, values.reshape(-1).tolist()))
    return tuple(hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in values)


def elements(values: numpy.ndarray[Any, Any]) -> tuple[int, int]:
    """How many numbers, and the sum modulo 2**64 of their hashes by splitmix64 (Steele et al., OOPSLA 2014)."""
    bits = numpy.frombuffer(values.tobytes(), numpy.dtype(f"u{min(values.itemsize, 8)}")).astype(numpy.uint64)
    bits += numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> numpy.uint64(shift))) * numpy.uint64(factor)
    return values.size, int((bits ^ (bits >> numpy.uint64(31))).sum(dtype=numpy.uint64))


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that the unwrapped module's forward has for them; by their numbers where it has none."""
    try:
        given = inspect.signature(unwrapped(module).forward).bind_partial(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(place): value for place, value in enumerate(args)}, **kwargs}
    found: dict[str, Any] = {}
    for name, value in given.arguments.items():
        kind = given.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found.update({str(place): one for place, one in enumerate(value)})
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def _tensors(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested containers, by its path."""
    inner: Any = ()
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        inner = enumerate(value)
    elif is_dataclass(value) and not isinstance(value, type):
        inner = ((field.name, getattr(value, field.name, None)) for field in fields(value))
    for name, one in inner:
        yield from _tensors(one, f"{path}.{name}" if path else str(name))
