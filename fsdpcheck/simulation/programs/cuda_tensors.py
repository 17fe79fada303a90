"""Functions of torch that name a GPU, called with the CPU in its place: by a mode that sees each of them on its thread.

What moves a tensor to a GPU, or back, copies it, as the bus does; one that is there already is copied too, for nobody
knows, a leaf with a gradient excepted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fsdpcheck.compat import cuda_private
from fsdpcheck.compat.dispatch_private import WITHOUT_VALUES
from fsdpcheck.compat.torch_private import is_dtensor
from fsdpcheck.execution.call_sites import line_of
from fsdpcheck.simulation.programs.cuda_devices import Devices, is_program

DEVICE: Final = torch.device
CPU: Final = torch.device("cpu")
OLD_TYPE: Final = "torch.cuda."
"""How names of types of tensors on a GPU begin, such as "torch.cuda.FloatTensor"."""
_DRAWS: Final = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def is_gpu(device: Any) -> bool:
    """Whether a device, as torch takes it, is a GPU: "cuda", "cuda:1", 1, torch.device("cuda", 1)."""
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    if isinstance(device, DEVICE):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def as_cuda(device: Any) -> torch.device:
    """A device, which may be a number; torch itself reads a number only where there is a GPU."""
    return DEVICE("cuda", device) if isinstance(device, int) else DEVICE(device)


class CallsOnCpu(TorchFunctionMode):
    """While it is entered, each function of torch that this thread calls uses the CPU where it would use a GPU."""

    def __init__(self, devices: Devices, note: Callable[[str], None]) -> None:
        super().__init__()
        self._devices, self._note = devices, note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        play = _OF_TENSORS.get(func)
        if play is not None:
            return play(self, func, args, options)
        if "device" not in options and "pin_memory" not in options:
            return func(*args, **options)
        place = _place(options, sys._getframe(1))
        if is_gpu(options.get("device")):
            self._note(f"{_name(func)}(device=)")
            options = {**options, "device": CPU}
            if func in _DRAWS and options.get("generator") is None:
                options["generator"] = self._devices.here.generator
        if options.get("pin_memory"):
            self._note(f"{_name(func)}(pin_memory=)")
            options = {**options, "pin_memory": False}
        result = func(*args, **options)
        memory = self._devices.here.memory
        if memory is not None and isinstance(result, torch.Tensor):
            memory.made(result, place, written_by(func), sys._getframe(1))
        return result

    def _moved(self, tensor: torch.Tensor, move: Callable[[], torch.Tensor], place: str, waits: bool) -> torch.Tensor:
        """What ``move`` gives, copied where nothing was moved, as a copy that the GPU has a part in.

        ``place``: where it goes; "" where that may be either. ``waits``: the host waits for the copy."""
        memory = self._devices.here.memory
        if memory is None:
            return _copied(tensor, move())
        with memory.quietly():
            same = (result := move()) is tensor
            result = _copied(tensor, result)
        there = memory.is_on_gpu(tensor)
        if not place or (there and place == "gpu"):
            place = "gpu" if there else ""
            memory.made(result, place, "" if same else "to", sys._getframe(2))
        elif result is tensor or (there := there or place == "gpu"):
            pins = place == "host" and not waits
            memory.made(result, "pinned" if pins else place, "", sys._getframe(2))
            if result is not tensor:
                memory.copied(result, tensor, not waits, line_of(sys._getframe(2)))
        return result

    def _to(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        tensor, *rest = args
        device = rest[0] if rest else options.get("device")
        waits = not (options.get("non_blocking") or any(value is True for value in rest[2:3]))
        place = "gpu"
        if is_gpu(device):
            self._note("Tensor.to")
            if rest:
                rest[0] = CPU
            else:
                options = {**options, "device": CPU}
        elif device in ("cpu", CPU) and _called_by_program():
            place = "host" if device == "cpu" else ""  # a device may be that of a tensor which is on a played GPU
        else:
            return function(*args, **options)
        return self._moved(tensor, lambda: function(tensor, *rest, **options), place, waits)

    def _cuda(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._note("Tensor.cuda")
        waits = not (options.get("non_blocking") or any(value is True for value in args[2:3]))
        return self._moved(args[0], lambda: args[0], "gpu", waits)

    def _cpu(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not _called_by_program():
            return function(*args, **options)
        return self._moved(args[0], lambda: function(*args, **options), "host", True)

    def _pin_memory(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self._note("Tensor.pin_memory")
        pinned = args[0].clone()
        if (memory := self._devices.here.memory) is not None:
            memory.made(pinned, "pinned", "", sys._getframe(2))
        return pinned

    def _read(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What reads values past the dispatcher."""
        if (memory := self._devices.here.memory) is not None:
            memory.read_by_host(args[0], _name(function), sys._getframe(2))
        return function(*args, **options)

    def _get_device(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not _called_by_program():
            return function(*args, **options)
        self._note("Tensor.get_device")
        return self._devices.here.index

    def _type(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if len(args) > 1 and isinstance(args[1], str) and args[1].startswith(OLD_TYPE):
            self._note("Tensor.type")
            args = (args[0], "torch." + args[1].removeprefix(OLD_TYPE), *args[2:])
        return function(*args, **options)

    def _attention(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Of DTensors: of the kernels for attention on the CPU, DTensor knows those of plain matrix products alone."""
        if not any(is_dtensor(tensor) for tensor in args if isinstance(tensor, torch.Tensor)):
            return function(*args, **options)
        from torch.distributed.tensor.experimental import implicit_replication

        self._note("scaled_dot_product_attention(DTensor)")
        with sdpa_kernel(SDPBackend.MATH), implicit_replication():
            return function(*args, **options)

    def _parse_to(self, function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Of Module.to, which then moves each tensor: a number of a device, which needs a GPU to be read."""
        if args and is_gpu(args[0]):
            args = (as_cuda(args[0]), *args[1:])
        if is_gpu(options.get("device")):
            options = {**options, "device": as_cuda(options["device"])}
        return function(*args, **options)


_ATTENTION: Final = torch.nn.functional.scaled_dot_product_attention
_OF_TENSORS: Final[dict[Any, Callable[..., Any]]] = {
    torch.Tensor.to: CallsOnCpu._to,
    torch.Tensor.cuda: CallsOnCpu._cuda,
    torch.Tensor.cpu: CallsOnCpu._cpu,
    torch.Tensor.pin_memory: CallsOnCpu._pin_memory,
    torch.Tensor.tolist: CallsOnCpu._read,
    torch.Tensor.numpy: CallsOnCpu._read,
    torch.Tensor.get_device: CallsOnCpu._get_device,
    torch.Tensor.type: CallsOnCpu._type,
    cuda_private.PARSE_TO: CallsOnCpu._parse_to,
    _ATTENTION: CallsOnCpu._attention,
}
_OURS: Final = 3
"""Frames from ``_called_by_program`` to who called the function of torch: it, a method, the mode."""


def _called_by_program() -> bool:
    return is_program(sys._getframe(_OURS))


def _place(options: dict[str, Any], frame: Any) -> str:
    """Where a tensor is made, as Memory.made has it."""
    device = options.get("device")
    if is_gpu(device):
        return "gpu"
    if options.get("pin_memory"):
        return "pinned"
    return "host" if device == "cpu" and is_program(frame) else ""


def written_by(function: Any) -> str:
    """The name of a function that makes tensors; "" if it gives them no values."""
    name = _name(function)
    return "" if name.rpartition(".")[2] in WITHOUT_VALUES else name


def _copied(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """``moved``, or a copy of it where nothing was moved, it has values, and it is no leaf with a gradient."""
    kept = tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled()
    if moved is not tensor or kept or torch.nn.parameter.is_lazy(tensor):
        return moved
    return moved.clone()


def _name(function: Any) -> str:
    name = getattr(function, "__name__", str(function))
    owner = getattr(function, "__objclass__", None)
    return f"torch.{name}" if owner is None else f"Tensor.{name}"
