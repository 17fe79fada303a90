"""IgnoredParameters: parameters of a sharded model that are not sharded, ``ignored_params`` of ``fully_shard``.

Every rank holds them whole. Nothing else averages their gradients, so it is done here: an all-reduce a parameter over
each axis, also for one that this rank has no gradient of. With the others they are clipped, noised and updated; noise
is a function of parameter and element, so that copies stay equal without a message.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from . import collectives
from .collectives import Axis, Subject
from .protocol import Piece
from .row_layout import RowLayout
from .spans import Span


class IgnoredParameters:
    """``parameters`` by canonical name, each whole on every rank of both axes."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], axis: Axis, replicas: Axis) -> None:
        self._axis, self._replicas = axis, replicas
        self._trainable = {name: value for name, value in parameters.items() if value.requires_grad}
        self.names = list(self._trainable)
        """Of the trainable ones."""
        self.averaged: dict[str, Tensor] = {}
        """Reduced gradients, by name; a parameter's ``grad`` may be this rank's own in between."""

    def before_backward(self) -> None:
        """Take averaged gradients away, so that whatever a parameter has next is this rank's own."""
        for name, averaged in self.averaged.items():
            if self._trainable[name].grad is averaged:
                self._trainable[name].grad = None

    def average(self, added: Mapping[str, Tensor]) -> None:
        """Average what backwards have formed and what is ``added``, and put it to what was averaged before."""
        for name, parameter in self._trainable.items():
            before, own = self.averaged.get(name), parameter.grad
            local = torch.zeros_like(parameter) if own is None or own is before else own.contiguous()
            if name in added:
                local = local + added[name].to(local.dtype)
            for axis in (self._axis, self._replicas):
                collectives.all_reduce_average(Subject(name), local, axis)
            parameter.grad = self.averaged[name] = local if before is None else before + local

    def forget(self) -> None:
        """Drop all gradients."""
        self.averaged = {}
        for parameter in self._trainable.values():
            parameter.grad = None

    def pieces(self) -> list[Piece]:
        """All of each, on every rank; those of the axis' first rank count."""
        copied = self._axis.rank > 0
        return [
            Piece(name, 0, p.detach().view(-1), self.averaged[name].view(-1) if name in self.averaged else None, copied)
            for name, p in self._trainable.items()
        ]

    def span(self, like: Tensor) -> Span:
        """All of ``like``, a live view, which the axis' first rank writes."""
        return Span(like.shape, 0, like.detach().view(-1), self._axis.rank == 0)

    def share(self, name: str) -> slice:
        """Elements of the flattened parameter that this rank answers for where each rank answers for some."""
        count = torch.Size([self._trainable[name].numel()])
        return RowLayout([count], self._axis.size).elements(0, self._axis.rank)
