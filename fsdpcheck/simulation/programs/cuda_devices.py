"""The functions of ``torch.cuda`` and ``torch.accelerator`` for GPUs that are played on the CPU.

A question ("is there a GPU?") is answered for the program alone: torch is told the truth, or it would call what is not
there. What acts (sets a device, a stream, a seed) acts on the state of the rank. Nothing here takes time or memory:
memory counts as 0, and streams are done in the order of the program; what that order need not be, simulation/device
knows. torch.cpu, which FSDP uses of tensors that are on the CPU, has the same streams. What is in no table below is
refused by name.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any, Final

import torch

from fsdpcheck.compat import cuda_private, frames_private, torch_private
from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.device.timelines import Timelines
from fsdpcheck.simulation.programs.cuda_streams import PlayedEvent, PlayedStream
from fsdpcheck.simulation.programs.stand_in import stand_in
from fsdpcheck.simulation.scheduler import where

NAME: Final = "CPU, played as a GPU"
_CAPABILITY: Final = (8, 0)
_SEED: Final = 104729

_ZERO: Final = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached"),
    *("max_memory_cached", "get_sync_debug_mode"),
)
_NOTHING: Final = (
    *("init", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "reset_max_memory_allocated"),
    *("reset_max_memory_cached", "reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
    *("set_sync_debug_mode", "empty_host_cache"),
)
_EMPTY: Final = ("memory_stats", "memory_stats_as_nested_dict")
_TYPES: Final = ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")


@dataclass
class _OfRank:
    """What a rank has set: its device, stream and the generator of its device; and, if it is watched, its memory."""

    index: int
    generator: torch.Generator
    stream_type: InitVar[type[PlayedStream]]
    timelines: Timelines = field(default_factory=Timelines)
    memory: Memory | None = None

    def __post_init__(self, stream_type: type[PlayedStream]) -> None:
        self.default_stream = self._stream = stream_type(timeline=self.timelines.default)

    @property
    def stream(self) -> PlayedStream:
        """The current stream."""
        return self._stream

    @stream.setter
    def stream(self, stream: PlayedStream) -> None:
        self._stream, self.timelines.current = stream, stream.timeline


class Devices:
    """``count`` played GPUs of each rank. ``rank`` tells whose turn it is; ``note`` is told what is played."""

    def __init__(self, rank: Callable[[], int | None], count: int, note: Callable[[str], None]) -> None:
        self._rank, self._count, self._note = rank, count, note
        self._own: dict[int | None, _OfRank] = {}
        self.Stream: type[PlayedStream] = type("Stream", (PlayedStream,), {"devices": self})
        self.Event: type[PlayedEvent] = type("Event", (PlayedEvent,), {"devices": self})

    @property
    def here(self) -> _OfRank:
        """That of the rank whose turn it is."""
        return self.of(self._rank())

    def of(self, rank: int | None) -> _OfRank:
        """That of a rank."""
        if rank not in self._own:
            self._own[rank] = _OfRank(0, torch.Generator().manual_seed(_SEED + (rank or 0)), self.Stream)
        return self._own[rank]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, ``torch.cuda`` and ``torch.accelerator`` are those of the played GPUs."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(cuda_private.initialised(self._not_played))
            for name in torch.cuda.__all__:
                real = getattr(torch.cuda, name)
                played = self._of_cuda(name, real)
                for module in cuda_private.modules():
                    if played is not real and vars(module).get(name) is real:
                        stack.enter_context(torch_private.replaced(module, **{name: played}))
            for name in torch.accelerator.__all__:
                played = self._of_accelerator(name, getattr(torch.accelerator, name))
                stack.enter_context(torch_private.replaced(torch.accelerator, **{name: played}))
            stack.enter_context(torch_private.replaced(torch.cpu, **self._of_cpu()))
            for module, named in self._beside().items():
                ours = {name: self._acting(f"{module.__name__}.{name}", play) for name, play in named.items()}
                stack.enter_context(torch_private.replaced(module, **ours))
            yield

    # -- the tables ----------------------------------------------------------------------------------------------

    def _of_cuda(self, name: str, real: Any) -> Any:
        """What stands for ``torch.cuda.name``: itself, an answer, an act, or a refusal."""
        full = f"torch.cuda.{name}"
        if name in (questions := self._questions()):
            return self._asked(full, real, questions[name])
        if name in (acts := self._acts()):
            return acts[name] if isinstance(acts[name], type) else self._acting(full, acts[name])
        if name.endswith("Tensor"):
            return getattr(torch, name) if name.removesuffix("Tensor") in _TYPES else real
        if name == "default_generators":
            return _Generators(self)
        if isinstance(real, types.ModuleType) or name.endswith(("Storage", "Error")) or not callable(real):
            return real
        if isinstance(real, type):
            return stand_in(real, self._refusing(full))
        return self._refusing(full)

    def _of_accelerator(self, name: str, real: Any) -> Any:
        full = f"torch.accelerator.{name}"
        asked: dict[str, Callable[..., Any]] = {
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "get_memory_info": lambda *_: _memory(),
            "get_device_capability": lambda *_: {"supported_dtypes": set()},
        }
        same = {"set_device_idx": "set_device", "set_device_index": "set_device", "device_index": "device"}
        same |= {"current_device_idx": "current_device", "current_device_index": "current_device"}
        asked |= {key: play for key, play in self._questions().items() if key in ("is_available", "device_count")}
        if name in asked:
            return self._asked(full, real, asked[name])
        act = self._acts().get(same.get(name, name))
        return self._refusing(full) if act is None else self._acting(full, act)

    def _questions(self) -> dict[str, Callable[..., Any]]:
        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: self._count,
            "is_bf16_supported": lambda *_, **__: True,
            "is_tf32_supported": lambda: True,
            "get_device_capability": lambda device=None: _CAPABILITY,
            "get_device_name": lambda device=None: NAME,
            "get_device_properties": lambda device=None: _properties(),
            "get_arch_list": lambda: [],
            "get_gencode_flags": lambda: "",
            "can_device_access_peer": lambda *_: False,
            "get_allocator_backend": lambda: "native",
            "is_current_stream_capturing": lambda: False,
            "mem_get_info": lambda device=None: _memory(),
        }

    def _acts(self) -> dict[str, Any]:
        acts: dict[str, Any] = dict.fromkeys(_ZERO, lambda *_, **__: 0)
        acts |= dict.fromkeys(_NOTHING, lambda *_, **__: None)
        acts |= dict.fromkeys(_EMPTY, lambda *_, **__: {})
        return acts | {
            "Stream": self.Stream,
            "Event": self.Event,
            "synchronize": lambda device=None: self.here.timelines.block_for_all(),
            "StreamContext": self._stream,
            "stream": self._stream,
            "set_device": self._set_device,
            "current_device": lambda: self.here.index,
            "device": self._device,
            "device_of": lambda tensor: contextlib.nullcontext(),
            "current_stream": lambda device=None: self.here.stream,
            "default_stream": lambda device=None: self.here.default_stream,
            "set_stream": lambda stream: setattr(self.here, "stream", stream or self.here.stream),
            "memory_summary": lambda *_, **__: "",
            "cudart": lambda: types.SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
            "manual_seed": lambda seed: self.here.generator.manual_seed(int(seed)) and None,
            "manual_seed_all": lambda seed: self.here.generator.manual_seed(int(seed)) and None,
            "seed": lambda: self.here.generator.seed() and None,
            "seed_all": lambda: self.here.generator.seed() and None,
            "initial_seed": lambda: self.here.generator.initial_seed(),
            "get_rng_state": lambda device=None: self.here.generator.get_state(),
            "get_rng_state_all": lambda: [self.here.generator.get_state()] * self._count,
            "set_rng_state": lambda state, device=None: self.here.generator.set_state(state) and None,
            "set_rng_state_all": lambda states: self.here.generator.set_state(states[self.here.index]) and None,
        }

    def _of_cpu(self) -> dict[str, Any]:
        """What FSDP asks for streams: it goes by the device of its mesh, which is the CPU."""
        acts = self._acts()
        names = ("Stream", "Event", "StreamContext", "stream", "current_stream", "synchronize")
        return {name: acts[name] for name in names}

    def _beside(self) -> dict[types.ModuleType, dict[str, Callable[..., Any]]]:
        """Functions of modules of ``torch.cuda`` that have no name in it."""
        cuda: Any = torch.cuda
        return {
            cuda.nccl: {"version": lambda: (0, 0, 0), "is_available": lambda tensors: True},
            cuda.profiler: {"start": lambda: None, "stop": lambda: None},
            cuda.nvtx: {
                "range_push": lambda message: 0,
                "range_pop": lambda: 0,
                "range_start": lambda message: 0,
                "range_end": lambda range_id: None,
                "mark": lambda message: None,
                "range": lambda *_, **__: contextlib.nullcontext(),
            },
        }

    # -- how they are put in place -------------------------------------------------------------------------------

    def _asked(self, name: str, real: Any, play: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **options: Any) -> Any:
            if not is_program(sys._getframe(1)):
                return real(*args, **options)
            self._note(name)
            return play(*args, **options)

        return ours

    def _acting(self, name: str, play: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **options: Any) -> Any:
            if is_program(sys._getframe(1)):
                self._note(name)
            return play(*args, **options)

        return ours

    def _refusing(self, name: str) -> Callable[..., Any]:
        def ours(*args: Any, **options: Any) -> Any:
            raise not_played(name)

        return ours

    def _not_played(self) -> None:
        raise not_played("a tensor or storage on a GPU")

    def _set_device(self, device: Any) -> None:
        index = self._index(device)
        if index >= self._count:
            at = where(sys._getframe(1))
            got = f"device {index} of {self._count} at {at}"
            raise RuntimeError(
                explain("CUDA error: invalid device ordinal", got=got, wanted="as many as ranks of a node")
            )
        self.here.index = max(index, 0)

    def _index(self, device: Any) -> int:
        if isinstance(device, int):
            return device
        index = torch.device(device).index if device is not None else None
        return self.here.index if index is None else index

    @contextlib.contextmanager
    def _device(self, device: Any = None) -> Iterator[None]:
        kept = self.here.index
        self._set_device(device)
        try:
            yield
        finally:
            self.here.index = kept

    @contextlib.contextmanager
    def _stream(self, stream: Any = None) -> Iterator[Any]:
        kept = self.here.stream
        self.here.stream = stream or kept
        try:
            yield stream
        finally:
            self.here.stream = kept


class _Generators:
    """``torch.cuda.default_generators``: that of the rank, whatever the index."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def __getitem__(self, index: int) -> torch.Generator:
        return self._devices.here.generator


def is_program(frame: types.FrameType) -> bool:
    """Whether a frame is of the program, or of a package that it uses: neither torch's nor the harness's."""
    file = frame.f_code.co_filename
    return not (frames_private.is_torch(file) or frames_private.is_harness(file))


def not_played(what: str) -> NotSupported:
    """The refusal of what the CPU cannot stand for."""
    return NotSupported(
        explain(
            f"{what} is not played on the CPU",
            where=where(sys._getframe(1)),
            then="leave it out by an option of the program, or run it on a GPU",
        )
    )


def _memory() -> tuple[int, int]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _properties() -> types.SimpleNamespace:
    major, minor = _CAPABILITY
    return types.SimpleNamespace(
        name=NAME, major=major, minor=minor, total_memory=_memory()[1], multi_processor_count=1, warp_size=32
    )
