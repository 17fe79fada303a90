"""Process-global state that a rank believes is its own, swapped at every hand-over between simulated ranks.

One table: what each thing is called, how it is read, how it is put back. Thread-local state (grad mode, default device,
dispatch modes) needs nothing. Costs decide the form: numpy's generator is swapped by reference (0.3 us instead of
70 us), Python's as one block of memory (simulation/python_rng.py), torch's by value (1 us), dicts of hooks by
reference (0.5 us), the environment as simulation/environment.py says. What ranks share and must not leave
behind is compared after a run instead (process_state).
"""

from __future__ import annotations

import copy
import functools
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import numpy as np
import numpy.random.mtrand as _numpy
import torch

from fsdpcheck.compat import observers_private, torch_private
from fsdpcheck.simulation import python_rng
from fsdpcheck.simulation.environment import Environments

_SEEDED_TORCH = torch.Generator().manual_seed(0).get_state()
_SEEDED_RANDOM = python_rng.seeded(0)
_SEEDED_NUMPY = np.random.MT19937(0).state


UNSEEDED: Final = 7919
"""Seeds from here on, a rank each, stand for what a process draws from the system."""


@dataclass
class _System:
    """``first``: the seed of rank 0 that stands for what its process draws from the system; others follow.

    ``alike``: all ranks have that of rank 0, and begin as after ``torch.manual_seed``, ``random.seed`` and
    ``numpy.random.seed`` with it.
    """

    first: int = UNSEEDED
    alike: bool = False

    def seed(self, rank: int) -> int:
        return self.first if self.alike else self.first + rank

    def of_numpy(self, rank: int) -> np.random.MT19937:
        generator = np.random.MT19937(self.seed(rank))
        if self.alike:
            generator.state = cast(Any, np.random.RandomState(self.first).get_state(legacy=False))
        return generator


system = _System()


@dataclass(frozen=True, slots=True)
class Swap:
    """One piece of global state. ``cheap``: to read costs less than to write, so it is written only when it differs.

    ``mutable``: a thing that ranks change in place; it is another one when it is another object. ``fresh(rank)``: what
    a newly started process of that rank has; None where that is what this process has.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    cheap: bool = True
    mutable: bool = False
    fresh: Callable[[int], Any] | None = None


def _cuda_swaps() -> list[Swap]:
    if not torch.cuda.is_available():
        return []
    cuda = torch.cuda
    return [
        Swap("cuda.device", _of_gpu(cuda.current_device), _to_gpu(cuda.set_device, lambda: 0)),
        Swap("cuda.stream", _of_gpu(cuda.current_stream), _to_gpu(cuda.set_stream, cuda.default_stream)),
        Swap("cuda.rng", _of_gpu(cuda.get_rng_state), _to_gpu(cuda.set_rng_state, _seeded_on_gpu), cheap=False),
    ]


def _of_gpu(read: Callable[[], Any]) -> Callable[[], Any]:
    """What ``read`` gives once a rank has used a GPU; None before, for to read would start CUDA: ranks on the CPU pay
    seconds for it, and half a gigabyte of the GPU."""
    cuda: Any = torch.cuda
    return lambda: read() if cuda.is_initialized() else None


def _to_gpu(write: Callable[[Any], object], first: Callable[[], Any]) -> Callable[[Any], None]:
    """Write; a rank that has not yet used a GPU, where another has, begins with what ``first`` gives."""

    cuda: Any = torch.cuda

    def written(value: Any) -> None:
        if cuda.is_initialized():
            write(first() if value is None else value)

    return written


def _seeded_on_gpu() -> Any:
    return torch.Generator("cuda").manual_seed(0).get_state()


def _swaps() -> list[Swap]:
    return [
        Swap("torch.rng", torch.default_generator.get_state, torch.default_generator.set_state, cheap=False),
        Swap("random", python_rng.read, python_rng.write, cheap=False),
        Swap("numpy.random", _numpy.get_bit_generator, _numpy.set_bit_generator, mutable=True),
        Swap("torch settings", _read_settings, _write_settings),
        Swap("python settings", _read_python, _write_python, cheap=False),
        Swap("working directory", os.getcwd, os.chdir),
        Swap("hooks of all modules", _read_hooks, _write_hooks),
        Swap("DTensor's operator handlers", torch_private.dtensor_handlers, torch_private.set_dtensor_handlers, False),
        Swap("FSDP1's profiler", _read_profiling, _write_profiling),
        Swap("flags of dispatch modes", observers_private.mode_flags, observers_private.set_mode_flags),
        *_cuda_swaps(),
    ]


class RankGlobals:
    """The saved global state of W ranks. ``leave(rank)`` saves, ``enter(rank)`` puts back; both run in the rank's turn.

    ``extra``: what ranks have apart besides, or otherwise. ``per_node``: ranks of one node; 0 for all. ``told``: how
    many there are, as their environment says; 0 for W.
    """

    def __init__(self, world_size: int, extra: Sequence[Swap] = (), per_node: int = 0, told: int = 0) -> None:
        self._swaps = list({swap.name: swap for swap in (*_swaps(), *extra)}.values())
        self._reads = [swap.read for swap in self._swaps]
        self._outside = self._read()
        self._now: list[Any] | None = None
        told = told or world_size
        self._environments = Environments(world_size, per_node or told, told)
        self._saved = [self._fresh(rank) for rank in range(world_size)]

    def leave(self, rank: int) -> None:
        self._saved[rank] = self._now = self._read()

    def enter(self, rank: int) -> None:
        """Put back what the rank had. What stands there now was read a moment ago, when the rank before it left."""
        now, self._now = self._now or self._read(), None
        for swap, there, wanted in zip(self._swaps, now, self._saved[rank], strict=True):
            if there is not wanted and (swap.mutable or not swap.cheap or there != wanted):
                swap.write(wanted)
        self._environments.enter(rank)

    def restore(self) -> None:
        """Put back what the process had before the run."""
        self._put_back(self._outside)
        self._environments.restore()

    def _read(self) -> list[Any]:
        return [read() for read in self._reads]

    def _put_back(self, values: list[Any]) -> None:
        for swap, value in zip(self._swaps, values, strict=True):
            if not swap.cheap or _differ(swap, swap.read(), value):
                swap.write(value)

    def _fresh(self, rank: int) -> list[Any]:
        """What a newly started process of this rank would have: fixed seeds, its environment, copies of the rest.

        Warnings are ignored: W ranks would give each W times, and the caller's "error" filter would fail a rank for it.
        """
        state = dict(zip((swap.name for swap in self._swaps), self._outside, strict=True))
        state["torch.rng"] = _SEEDED_TORCH
        state["random"] = _SEEDED_RANDOM
        state["numpy.random"] = _numpy_generator(rank)
        state["python settings"] = ([("ignore", None, Warning, None, 0)], *state["python settings"][1:])
        state["DTensor's operator handlers"] = state["DTensor's operator handlers"].copy()
        for swap in self._swaps:
            if swap.fresh is not None:
                state[swap.name] = swap.fresh(rank)
        return list(state.values())


_numpy_generators: list[np.random.MT19937] = []


def unseeded() -> tuple[Swap, ...]:
    """Generators that begin on each rank with numbers of its own, as those of processes do that nobody has seeded.

    With which, ``system.first`` says: a process that has set it draws other numbers from the system.
    """
    fresh: dict[str, Callable[[int], Any]] = {
        "torch.rng": lambda rank: torch.Generator().manual_seed(system.seed(rank)).get_state(),
        "random": lambda rank: python_rng.seeded(system.seed(rank)),
        "numpy.random": system.of_numpy,
    }
    return tuple(replace(swap, fresh=fresh[swap.name]) for swap in _swaps() if swap.name in fresh)


def begin_generators(rank: int) -> None:
    """This rank goes on as a process that is new, which has none of what its parent has seeded."""
    for swap in unseeded():
        assert swap.fresh is not None
        swap.write(swap.fresh(rank))


def inherit_generators(rank: int) -> None:
    """This rank goes on as a forked child: generators that it has not used are those of the one parent of all ranks."""
    for swap in unseeded():
        assert swap.fresh is not None
        if _state(swap.read()) == _state(swap.fresh(rank)):
            swap.write(swap.fresh(0))


def _state(generator: Any) -> Any:
    """The state of a generator as ``Swap.read`` gives it, to be compared."""
    if isinstance(generator, np.random.MT19937):
        state = generator.state["state"]
        return state["key"].tobytes(), state["pos"]
    return generator.numpy().tobytes() if isinstance(generator, torch.Tensor) else generator


def _numpy_generator(rank: int) -> np.random.MT19937:
    """A rank's bit generator as after a seed of 0; reused, for to set a state costs a third of making a generator."""
    while len(_numpy_generators) <= rank:
        _numpy_generators.append(np.random.MT19937(0))
    _numpy_generators[rank].state = _SEEDED_NUMPY
    return _numpy_generators[rank]


def _differ(swap: Swap, now: Any, then: Any) -> bool:
    return now is not then and (swap.mutable or bool(now != then))


def module_global(dotted: str) -> Swap:
    """A global "pkg.mod:NAME" of a module, or an attribute "pkg.mod:Class.NAME" of a class in it.

    Each rank begins with a copy of what it is now.
    """
    module_name, _, path = dotted.partition(":")
    *outer, attribute = path.split(".")
    owner: Any = functools.reduce(getattr, outer, importlib.import_module(module_name))
    pristine = copy.deepcopy(getattr(owner, attribute))
    return Swap(
        dotted,
        lambda: getattr(owner, attribute),
        lambda value: setattr(owner, attribute, value),
        cheap=False,
        fresh=lambda rank: copy.deepcopy(pristine),
    )


def _read_settings() -> tuple[Any, ...]:
    """What torch computes with: together, for they seldom change and one comparison tells."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.mkldnn.enabled,
    )


def _write_settings(settings: tuple[Any, ...]) -> None:
    dtype, deterministic, warn_only, precision, mkldnn = settings
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_float32_matmul_precision(precision)
    torch.backends.mkldnn.enabled = mkldnn


def _read_python() -> tuple[Any, ...]:
    """Warnings (a list changed in place, functions), streams, hook, level of logging: names of Python's own modules."""
    return (
        warnings.filters,
        sys.stdout,
        sys.stderr,
        sys.excepthook,
        warnings.showwarning,
        cast(Any, warnings)._showwarnmsg_impl,  # what catch_warnings(record=True) replaces
        logging.root.manager.disable,
    )


def _write_python(settings: tuple[Any, ...]) -> None:
    """Always written, by reference, for that is cheaper than to compare; but not what has side effects."""
    filters, sys.stdout, sys.stderr, sys.excepthook, warnings.showwarning, shown, disabled = settings
    cast(Any, warnings)._showwarnmsg_impl = shown
    if warnings.filters is not filters:
        warnings.filters = filters
        cast(Any, warnings)._filters_mutated()
    if logging.root.manager.disable != disabled:
        logging.disable(disabled)


_HOOKED = [vars(importlib.import_module(name)) for name in ("torch.nn.modules.module", "torch.optim.optimizer")]
_HOOKS: list[dict[Any, Any]] = [
    value
    for names in _HOOKED
    for name, value in names.items()
    if name.startswith("_global_") and hasattr(value, "copy")
]
_Hooks = tuple[bool | None, tuple[dict[Any, Any], ...]]
_NO_HOOKS: _Hooks = (None, tuple({} for _ in _HOOKS))


def _read_hooks() -> _Hooks:
    """Hooks on all modules and optimizers: whose backward hooks are of which kind, and the entries of each dict."""
    kind = _HOOKED[0]["_global_is_full_backward_hook"]
    return (kind, tuple(hooks.copy() for hooks in _HOOKS)) if any(_HOOKS) or kind is not None else _NO_HOOKS


def _write_hooks(wanted: _Hooks) -> None:
    """In place, for who may remove a hook holds a reference to its dict."""
    _HOOKED[0]["_global_is_full_backward_hook"], entries = wanted
    for hooks, those in zip(_HOOKS, entries, strict=True):
        hooks.clear()
        hooks.update(those)


_NOTHING: frozenset[str] = frozenset()


def _read_profiling() -> frozenset[str]:
    profiling = torch_private.fsdp1_profiling()
    return frozenset(profiling) if profiling else _NOTHING


def _write_profiling(wanted: frozenset[str]) -> None:
    profiling = torch_private.fsdp1_profiling()
    profiling.clear()
    profiling.update(wanted)
