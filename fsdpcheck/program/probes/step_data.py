"""A probe that notes what passes in a step: parameters as they are read, samples, gradients, what an optimizer does.

It hangs hooks into the model before it is sharded, the loss and each optimizer. They change no value, and look at what
an implementation gives torch itself, so that nothing is asked of an adapter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdpcheck.compat import frames_private, groups_private, layouts_private, torch_private
from fsdpcheck.execution.pieces import NotPlaced, Pieces, Shown
from fsdpcheck.execution.quantities import Quantity, QuantityKind
from fsdpcheck.program.probe import Notes, probe

_LINES: Final = 3
_OPTIONS: Final = ("lr", "momentum", "weight_decay", "betas", "eps")


@probe()
def quantities(model: nn.Module, notes: Notes) -> None:
    """Notes each Quantity of a step."""
    _Passing(model, notes, local_gradients=True)


@probe()
def quantities_but_local_gradients(model: nn.Module, notes: Notes) -> None:
    """The same without hooks on tensors, which who forms gradients of single samples may refuse."""
    _Passing(model, notes, local_gradients=False)


class _Passing:
    """One rank's, of its newest trainer. ``local_gradients``: whether hooks are hung on parameters as they are read."""

    def __init__(self, model: nn.Module, notes: Notes, local_gradients: bool) -> None:
        self._notes, self._step, self._micro_batch, self._hangs = notes, -1, 0, local_gradients
        self._pieces, self._hung = Pieces(), "_fsdpcheck_passes"
        names = {id(value): name for name, value in model.named_parameters()}
        self._places = [
            (module, local, names[id(value)])
            for module in model.modules()
            for local, value in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        for module in {id(module): module for module, _, _ in self._places}.values():
            module.register_forward_pre_hook(lambda module, _: self._read(module))
        notes.on_loss(lambda loss: loss.register_forward_hook(lambda _, given, losses: self._arrived(given)))
        notes.on_optimizer(self._optimizer)

    def _note(self, kind: QuantityKind, name: str, value: object) -> None:
        frame = sys._getframe(1)
        lines = frames_private.lines_of(frame, _LINES)
        self._notes.add(Quantity(kind, name, self._micro(), value, groups_private.calls_so_far(), lines))

    def _micro(self) -> int:
        if self._notes.step() != self._step:
            self._step, self._micro_batch = self._notes.step(), 0
        return self._micro_batch

    def _read(self, module: nn.Module) -> None:
        """Each parameter of ``module``, and what a backward will give for it."""
        if not self._notes.in_step():
            return
        for own, local, name in self._places:
            value = getattr(module, local, None) if own is module else None
            if not isinstance(value, Tensor) or torch_private.is_dtensor(value):
                continue
            self._note("parameter", name, _copy(value))
            if self._hangs and torch.is_grad_enabled() and value.requires_grad and not hasattr(value, self._hung):
                setattr(value, self._hung, True)
                value.register_hook(lambda gradient, name=name: self._gave(name, gradient))  # type: ignore[no-untyped-call]

    def _gave(self, name: str, gradient: Tensor) -> None:
        if self._notes.in_step() and not torch_private.is_dtensor(gradient):
            self._note("local gradient", name, _copy(gradient))

    def _arrived(self, given: tuple[Tensor, ...]) -> None:
        if self._notes.in_step():
            self._note("samples", "", _copy(given[1]))
            self._micro_batch += 1

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        made, names = _options(optimizer), self._names()
        held = [value for group in optimizer.param_groups for value in group["params"]]

        def before(*_: object) -> None:
            now = _options(optimizer)
            self._note("options", "", {key: (now[key], made[key]) for key in made if now[key] != made[key]})
            self._of_each(held, names, "gradient", lambda value: value.grad)

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: self._of_each(held, names, "updated", lambda value: value))

    def _names(self) -> dict[int, str]:
        """Of the parameters that the model has by now."""
        return {id(getattr(module, local, None)): name for module, local, name in self._places}

    def _of_each(
        self, held: list[nn.Parameter], names: dict[int, str], kind: QuantityKind, read: Callable[[Any], Any]
    ) -> None:
        for value in held:
            if id(value) in names:
                self._note(kind, names[id(value)], self._shown(read(value)))

    def _shown(self, value: Tensor | None) -> Tensor | Shown | None:
        if value is None or not torch_private.is_dtensor(value):
            return None if value is None else _copy(value)
        try:
            piece = self._pieces.of(value)
        except NotPlaced:
            return None
        return None if piece is None else Shown(piece, value.dtype, layouts_private.companions(value))


def _options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        f"{key} of group {number}": group[key]
        for number, group in enumerate(optimizer.param_groups)
        for key in _OPTIONS
        if key in group
    }


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)
