"""GPUs played on the CPU: a script that says "cuda" runs, and each substitution is counted by name.

Tensors are on the CPU and say so. What moves one to a GPU, or back, copies it, as the bus does; one that is there
already is copied too, a leaf with a gradient excepted. A GPU has its own random generator: what names a GPU where it
draws takes its numbers from it, other draws come from the rank's one generator for the CPU. That a GPU computes beside
the host, in streams, is a model (docs/streams.md). Not modelled: how much memory it has, its rounding, its arithmetic
of float16 and TF32.

Three layers: functions of torch that name a device, by a function mode of each thread; torch.cuda and torch.accelerator
(cuda_devices.py); and the classes that are told of GPUs when they are made.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fsdpcheck.compat import cuda_private, dispatch_private
from fsdpcheck.compat.torch_private import replaced
from fsdpcheck.execution import Failure
from fsdpcheck.simulation.device.memory import Memory
from fsdpcheck.simulation.programs import sync_batch_norm
from fsdpcheck.simulation.programs.cuda_devices import Devices
from fsdpcheck.simulation.programs.cuda_tensors import (
    CPU,
    DEVICE,
    OLD_TYPE,
    CallsOnCpu,
    as_cuda,
    is_gpu,
    written_by,
)
from fsdpcheck.simulation.programs.stand_in import standing_in

_GENERATOR: Final = torch.Generator


class CudaAsCpu:
    """The GPUs of all ranks. ``counts``: how often what was played, by name."""

    def __init__(self, rank: Callable[[], int | None], devices: int, nccl: str = "nccl") -> None:
        """``rank``: that which runs now. ``devices``: how many GPUs each finds.

        ``nccl``: the backend that stands for it; on simulated ranks every backend is theirs, whatever its name.
        """
        self._nccl = nccl
        self.counts: Counter[str] = Counter()
        self.asked, self._has_halves = "", False
        self._devices = Devices(rank, devices, self._note)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, torch in this process has GPUs; each thread that uses them must be ``on_thread`` too."""
        with ExitStack() as stack:
            stack.enter_context(self._devices.in_place())
            stack.enter_context(sync_batch_norm.in_place(self._note))
            stack.enter_context(dispatch_private.within_each_backward(self._own_kernels))
            stack.enter_context(
                cuda_private.device_contexts(self._device("torch.device as default"), self._made_by_default)
            )
            stack.enter_context(standing_in(torch, "device", self._make_device))
            stack.enter_context(standing_in(torch, "Generator", self._make_generator))
            for real, played in ((torch.Stream, self._devices.Stream), (torch.Event, self._devices.Event)):
                stack.enter_context(standing_in(torch, real.__name__, self._make(real, played), played))
            for owner, functions in self._functions():
                stack.enter_context(replaced(owner, **functions))
            yield

    def memory(self, rank: int, refuse: Callable[[Failure], object]) -> Memory:
        """That of a rank's GPU, from now on watched; ``refuse`` is given what breaks the order of its streams."""
        here = self._devices.of(rank)
        here.memory = Memory(rank, here.timelines, refuse)
        return here.memory

    @contextmanager
    def on_thread(self) -> Iterator[None]:
        """While open, functions of torch that this thread calls with a GPU use the CPU."""
        with CallsOnCpu(self._devices, self._note):
            yield

    def run(self, program: Callable[[], Any]) -> Any:
        """What ``program`` returns."""
        return program()

    @contextmanager
    def _own_kernels(self) -> Iterator[None]:
        """While open, what computes in float16 uses torch's own kernels.

        Of gradients of convolutions in float16, oneDNN has on most CPUs a reference kernel alone: 8 times as slow.
        """
        mkldnn, before = cast(Any, torch.backends.mkldnn), torch.backends.mkldnn.enabled
        mkldnn.enabled = before and not self._has_halves
        try:
            yield
        finally:
            mkldnn.enabled = before

    def _note(self, name: str) -> None:
        self.counts[name] += 1

    def _made_by_default(self, function: Any, result: Any) -> None:
        memory = self._devices.here.memory
        if memory is not None and isinstance(result, torch.Tensor):
            memory.made(result, "gpu", written_by(function), sys._getframe(1))

    def _recorded_by_program(self, tensor: torch.Tensor, stream: Any) -> None:
        self._note("Tensor.record_stream")
        self._record_stream(tensor, stream)

    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        memory = self._devices.here.memory
        if memory is not None:
            memory.recorded(tensor, stream.timeline)

    def _resize(self, real: Any) -> Callable[..., Any]:
        """``UntypedStorage.resize_``: FSDP frees memory so, and asks for it again."""

        def ours(storage: Any, size: int) -> Any:
            memory = self._devices.here.memory
            if memory is not None:
                memory.resized(storage, size, sys._getframe(1))
            return real(storage, size)

        return ours

    # -- what is told of GPUs when it is made ----------------------------------------------------------------------

    def _device(self, name: str) -> Callable[[Any], Any]:
        def change(device: Any) -> Any:
            if not is_gpu(device):
                return device
            self._note(name)
            return CPU

        return change

    def _make_device(self, *args: Any, **options: Any) -> torch.device:
        if len(args) == 1 and not options and is_gpu(args[0]) and isinstance(args[0], int):
            self._note("torch.device(int)")
            return as_cuda(args[0])
        return DEVICE(*args, **options)

    def _make_generator(self, device: Any = None) -> torch.Generator:
        return _GENERATOR(device=self._device("torch.Generator")(device if device is not None else CPU))

    def _make(self, real: Any, played: type) -> Callable[..., Any]:
        def make(device: Any = "cuda", *args: Any, **options: Any) -> Any:
            if not is_gpu(device):
                return real(device, *args, **options)
            self._note(f"torch.{real.__name__}")
            return played()

        return make

    def _functions(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Owner, and what stands in place of its attributes."""
        with_ = self._with
        yield torch.Tensor, {"record_stream": lambda tensor, stream: self._recorded_by_program(tensor, stream)}
        yield torch.UntypedStorage, {"resize_": self._resize(torch.UntypedStorage.resize_)}
        for module in cuda_private.who_record_streams():
            yield module, {cuda_private.RECORD_STREAM: self._record_stream}
        yield torch, {"load": self._load(torch.load), "get_device_module": self._module(torch.get_device_module)}
        yield torch, {"set_default_tensor_type": self._default_type(torch.set_default_tensor_type)}
        yield torch.autocast, {"__init__": self._autocast(torch.autocast.__init__)}
        yield torch.amp.GradScaler, {"__init__": with_(torch.amp.GradScaler.__init__, "GradScaler", device=CPU.type)}
        for name in ("custom_fwd", "custom_bwd"):
            yield torch.amp, {name: with_(getattr(torch.amp, name), f"torch.amp.{name}", device_type=CPU.type)}
        yield DeviceMesh, {"__init__": with_(DeviceMesh.__init__, "DeviceMesh", device_type=CPU.type)}
        for kind, names in (
            (DistributedDataParallel, ("device_ids", "output_device")),
            (DataLoader, ("pin_memory",)),
        ):
            yield kind, {"__init__": self._without(cast(Any, kind).__init__, kind.__name__, *names)}
        fsdp = self._with(FullyShardedDataParallel.__init__, "FullyShardedDataParallel", device_id=CPU)
        yield FullyShardedDataParallel, {"__init__": fsdp}
        yield DistributedDataParallel, {cuda_private.NO_SYNC_BATCH_NORM: lambda wrapped, module: None}
        for name in ("init_process_group", "new_group"):
            ours = self._group(getattr(dist, name), name)
            yield dist, {name: ours}
            yield dist.distributed_c10d, {name: ours}
        yield dist, {"is_nccl_available": lambda: True}

    def _with(self, real: Any, name: str, **instead: Any) -> Callable[..., Any]:
        """``real`` with these arguments in place of a GPU, or of None, which means the GPU that is there."""
        signature = inspect.signature(real)

        def ours(*args: Any, **options: Any) -> Any:
            bound = signature.bind_partial(*args, **options)
            for argument, value in instead.items():
                given = bound.arguments.get(argument, signature.parameters[argument].default)
                if given is None or is_gpu(given):
                    self._note(f"{name}({argument}=)")
                    bound.arguments[argument] = value
            return real(*bound.args, **bound.kwargs)

        return ours

    def _without(self, real: Any, name: str, *dropped: str) -> Callable[..., Any]:
        """``real`` without these arguments."""
        signature = inspect.signature(real)

        def ours(*args: Any, **options: Any) -> Any:
            bound = signature.bind_partial(*args, **options)
            for argument in dropped:
                value = bound.arguments.get(argument)
                if not (value is None or value is False or value == CPU.type or value == CPU):
                    self._note(f"{name}({argument}=)")
                    del bound.arguments[argument]
            return real(*bound.args, **bound.kwargs)

        return ours

    def _autocast(self, real: Any) -> Callable[..., Any]:
        def ours(context: Any, device_type: str, dtype: Any = None, *args: Any, **options: Any) -> None:
            if device_type == "cuda":
                self._note("autocast")
                device_type, dtype = CPU.type, dtype or torch.get_autocast_dtype("cuda")
                self._has_halves |= dtype is torch.float16
            real(context, device_type, dtype, *args, **options)

        return ours

    def _group(self, real: Any, name: str) -> Callable[..., Any]:
        """Without ``device_id``, and with another backend in place of NCCL where it is named."""
        bare, signature = self._without(real, name, "device_id"), inspect.signature(real)

        def ours(*args: Any, **options: Any) -> Any:
            bound = signature.bind_partial(*args, **options)
            backend = bound.arguments.get("backend")
            if isinstance(backend, str) and "nccl" in backend.lower():
                self._note(f'{name}("nccl")')
                bound.arguments["backend"] = backend.lower().replace("nccl", self._nccl)
            return bare(*bound.args, **bound.kwargs)

        return ours

    def _load(self, real: Any) -> Callable[..., Any]:
        def ours(f: Any, map_location: Any = None, *args: Any, **options: Any) -> Any:
            if is_gpu(map_location):
                self._note("torch.load(map_location=)")
            places = map_location if callable(map_location) or isinstance(map_location, dict) else CPU
            return real(f, places, *args, **options)

        return ours

    def _module(self, real: Any) -> Callable[..., Any]:
        return lambda device=None: real("cuda" if device is None else device)

    def _default_type(self, real: Any) -> Callable[..., Any]:
        def ours(kind: Any) -> None:
            if isinstance(kind, str) and kind.startswith(OLD_TYPE):
                self._note("torch.set_default_tensor_type")
                kind = "torch." + kind.removeprefix(OLD_TYPE)
            real(kind)

        return ours
