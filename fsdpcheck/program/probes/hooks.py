"""Probes that hang hooks into a rank's model before it is sharded, and note what they see.

They are what a user's own hooks would be, so nothing is asked of an adapter but that it shards the modules it is given.
They look at what modules hold and when they are called; none changes a value but ``start_apart`` and ``start_between``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.compat import groups_private, torch_private
from fsdpcheck.program.probe import Notes, probe

SLOPE = "slope"


@probe()
def accumulations(model: nn.Module, notes: Notes) -> None:
    """Notes how many trained parameters an optimizer is made for, then the number of each whose gradient is there.

    Parameters are numbered over all optimizers, in the order in which these are made.
    """
    known = 0

    def watch(optimizer: torch.optim.Optimizer) -> None:
        nonlocal known
        parameters = [value for group in optimizer.param_groups for value in group["params"]]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        notes.add(len(trained))
        first, known = known, known + len(trained)
        for number, parameter in enumerate(trained, first):
            parameter.register_post_accumulate_grad_hook(partial(_note_number, notes, number))

    notes.on_optimizer(watch)


@probe()
def hook_calls(model: nn.Module, notes: Notes) -> None:
    """Notes (kind of hook, module) whenever a hook of any module fires."""
    for name, module in model.named_modules():
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            getattr(module, f"register_{kind}_hook")(partial(_note_call, notes, (kind, name)))


@probe()
def footprint(model: nn.Module, notes: Notes) -> None:
    """Notes when layers run between collectives, how large the losses' gradients are, and how parameters lie.

    At the model's and each layer's forward (layer, collectives since the trainer was built); at each backward
    (SLOPE, the largest absolute gradient of the model's output); at the first moment of training and after each step
    the placements of parameters that are DTensors, which they are not while they are gathered.
    """
    built = 0
    for name, module in [("", model), *_layers(model)]:
        module.register_forward_pre_hook(lambda *_, name=name: notes.add((name, groups_private.calls_so_far() - built)))
    model.register_full_backward_pre_hook(lambda _, slopes: notes.add((SLOPE, _largest(slopes))))
    first = True

    def lie(moment: str) -> None:
        nonlocal built, first
        if moment == "after_init":
            built = groups_private.calls_so_far()
        elif first or moment == "after_step":
            first = False
            notes.add([str(getattr(p, "placements", "")) for p in model.parameters()])

    notes.on_moment(lie)


@probe()
def gathered(model: nn.Module, notes: Notes) -> None:
    """Notes (when, layer, the parameters that lie in more bytes than before the first step, collectives called so far).

    In the order of events: at each call of the model ("call"), behind each layer's forward ("forward"), and before its
    backward ("backward"). Parameters by the first name that they had before they were sharded.
    """
    places = [(name, module, own) for name, module in _layers(model) for own, _ in module.named_parameters("", False)]
    rest: dict[tuple[str, str], int] = {}

    def more(layer: str, when: str) -> tuple[str, str, list[str], int]:
        grown = [(name, own) for name, module, own in places if _room(module, own) > rest.get((name, own), 0)]
        return when, layer, [f"{name}.{own}" for name, own in grown], groups_private.calls_so_far()

    def settle(moment: str) -> None:
        if moment == "after_init":
            rest.update({(name, own): _room(module, own) for name, module, own in places})

    model.register_forward_pre_hook(lambda *_: notes.add(("call", "", [], groups_private.calls_so_far())))
    for name, module in _layers(model):
        module.register_forward_hook(_noting(notes, partial(more, name, "forward")))
        module.register_full_backward_pre_hook(_noting(notes, partial(more, name, "backward")))
    notes.on_moment(settle)


@probe(at=("after_init",))
def set_up(trainer: object, notes: Notes) -> int:
    """How many collectives the rank had called when its trainer was built; hangs no hook."""
    return groups_private.calls_so_far()


@probe()
@torch.no_grad()
def start_apart(model: nn.Module, notes: Notes) -> None:
    """Adds the rank to each element of each parameter, and notes the values by name: rank 0 keeps the case's.

    So no two ranks build an element alike, and of a value that comes out it can be told which rank has built it.
    """
    for parameter in model.parameters():
        parameter.add_(notes.rank)
    notes.add({name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()})


@probe()
@torch.no_grad()
def start_between(model: nn.Module, notes: Notes) -> None:
    """Adds 1/2 + 2^-9 + 2^-15 to each element of each parameter, on every rank alike, and notes the values by name.

    Integers below 2^8 then need 15 to 24 bits: a float32 holds all of them, a bfloat16 and a float16 none, and of small
    ones these two make different numbers.
    """
    for parameter in model.parameters():
        parameter.add_(0.5 + 2.0**-9 + 2.0**-15)
    notes.add({name: value.detach().to("cpu", copy=True) for name, value in model.named_parameters()})


@probe()
def memory(model: nn.Module, notes: Notes) -> None:
    """Notes (when, bytes) that the modules' parameters lie in: in layers' forwards and backwards, and between steps.

    Memory that several parameters share counts once, whole; of a DTensor the local part. On a GPU that no other rank of
    the process uses, also ("allocated", bytes) after each step: all that the allocator has given out.
    """
    for _, module in _layers(model):
        module.register_forward_hook(_noting(notes, lambda: ("in a step", _bytes(model))))
        module.register_full_backward_pre_hook(_noting(notes, lambda: ("in a step", _bytes(model))))

    def rest(moment: str) -> None:
        if moment in ("after_init", "after_step"):
            notes.add(("at rest", _bytes(model)))
        if moment == "after_step" and (held := _allocated(model)) is not None:
            notes.add(("allocated", held))

    notes.on_moment(rest)


@probe()
def interrupt_forward(model: nn.Module, notes: Notes) -> None:
    """Raises Interrupted once a step in the forward of the layer in the middle, on every rank, and notes it."""
    once = _Once(notes, 1)
    _middle(model).register_forward_hook(lambda *_: once())


@probe()
def interrupt_later(model: nn.Module, notes: Notes) -> None:
    """Raises Interrupted once a step in the forward of the second micro-batch: gradients of the first are there."""
    once = _Once(notes, 2)
    _middle(model).register_forward_hook(lambda *_: once())


@probe()
def interrupt_backward(model: nn.Module, notes: Notes) -> None:
    """Raises Interrupted once a step in the backward, where it reaches the output of the layer in the middle."""
    once = _Once(notes, 1)

    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: once())  # type: ignore[no-untyped-call]

    _middle(model).register_forward_hook(watch)


class _Once:
    """Raises Interrupted at the call of this number in each step, counted from 1."""

    def __init__(self, notes: Notes, number: int) -> None:
        self._notes, self._number, self._step, self._calls = notes, number, -1, 0

    def __call__(self) -> None:
        if self._notes.step() > self._step:
            self._step, self._calls = self._notes.step(), 0
        self._calls += 1
        if self._calls == self._number:
            self._notes.add("interrupted")
            self._notes.interrupt()


def _noting(notes: Notes, read: Callable[[], object]) -> Callable[..., None]:
    return lambda *_: notes.add(read())


def _note_call(notes: Notes, hook: tuple[str, str], *_: Any) -> None:
    notes.add(hook)


def _note_number(notes: Notes, number: int, _: Tensor) -> None:
    notes.add(number)


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with parameters of their own, in order."""
    return [
        (name, module) for name, module in model.named_modules() if next(module.parameters(False), None) is not None
    ]


def _middle(model: nn.Module) -> nn.Module:
    layers = _layers(model)
    return layers[(len(layers) - 1) // 2][1]


def _largest(values: Any) -> float:
    sizes = [value.abs().max().item() for value in values if isinstance(value, Tensor) and value.numel()]
    return float(max(sizes, default=0.0))


def _room(module: nn.Module, name: str) -> int:
    """Bytes of the memory in which a parameter of this module lies, whoever shares it."""
    return _storage(getattr(module, name)).nbytes()


def _storage(parameter: Tensor) -> torch.UntypedStorage:
    local = parameter.to_local() if torch_private.is_dtensor(parameter) else parameter
    return local.untyped_storage()


def _allocated(model: nn.Module) -> int | None:
    """Bytes that the allocator of the model's GPU has given out; None on the processors.

    And None on threads: simulated ranks share an allocator, which does not know whose a byte is. Source:
    ``torch.cuda.memory_allocated``.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type != "cuda" or threading.current_thread() is not threading.main_thread():
        return None
    return int(torch.cuda.memory_allocated(device))


def _bytes(model: nn.Module) -> int:
    storages = {}
    for parameter in model.parameters():
        storage = _storage(parameter)
        storages[storage.data_ptr() or id(parameter)] = storage.nbytes()
    return sum(storages.values())
