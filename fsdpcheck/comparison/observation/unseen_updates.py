"""Parameters that change though no optimizer was seen to step them: a step that was not observed is told."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdpcheck.comparison.observation.rank_log import RankLog, line
from fsdpcheck.compat import layouts_private
from fsdpcheck.compat.torch_private import own_part
from fsdpcheck.simulation.in_flight import is_there


@dataclass(frozen=True)
class _First:
    """A parameter of a module at the first forward, and where that was."""

    module: nn.Module
    name: str
    parameter: Tensor
    value: Tensor
    there: str

    def is_covered(self, covered: dict[int, Tensor]) -> bool:
        """Whether an optimizer has it, or what stands in its place now: of one that FSDP had gathered, the shard."""
        return id(self.parameter) in covered or id(self.module._parameters.get(self.name)) in covered

    def is_changed(self) -> bool:
        """Whether it is there to be read and other than it was."""
        now = own_part(self.parameter).detach()
        return (now.layout is not torch.strided or is_there(now)) and not _equal(now, self.value)


class UnseenUpdates:
    """Keeps what parameters are at the first forward of their root."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._first: dict[int, _First] = {}

    def begin(self, root: nn.Module) -> None:
        """The root is called for the first time with gradients."""
        there = line()
        with layouts_private.aside():
            for module in root.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.requires_grad and id(parameter) not in self._first:
                        value = own_part(parameter).detach().clone()
                        self._first[id(parameter)] = _First(module, name, parameter, value, there)

    def end(self, covered: dict[int, Tensor]) -> None:
        """The script has ended; note what has changed and is not ``covered`` by an optimizer."""
        with layouts_private.aside():
            changed = [first for first in self._first.values() if not first.is_covered(covered) and first.is_changed()]
        for there in sorted({first.there for first in changed}):
            shapes = [str(tuple(first.parameter.shape)) for first in changed if first.there == there]
            self._log.notes[
                f"{len(shapes)} parameters changed, of shape {shapes[0]} say, and no step of an optimizer was seen; "
                f"their module was first called at {there or 'a line that is not known'}"
            ] += 1


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | (torch.isnan(one) & torch.isnan(other))).all())
