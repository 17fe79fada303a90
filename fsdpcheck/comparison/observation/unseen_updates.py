"""Parameters that change though no optimizer was seen to step them: a step that was not observed is told."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdpcheck.comparison.observation.rank_log import RankLog, line
from fsdpcheck.compat import layouts_private
from fsdpcheck.compat.torch_private import own_part
from fsdpcheck.simulation.in_flight import is_there


class UnseenUpdates:
    """Keeps what parameters are at the first forward of their root."""

    def __init__(self, log: RankLog) -> None:
        self._log = log
        self._first: dict[int, tuple[Tensor, Tensor, str]] = {}

    def begin(self, root: nn.Module) -> None:
        """The root is called for the first time with gradients."""
        there = line()
        with layouts_private.aside():
            for parameter in root.parameters():
                if parameter.requires_grad and id(parameter) not in self._first:
                    self._first[id(parameter)] = parameter, own_part(parameter).detach().clone(), there

    def end(self, covered: dict[int, Tensor]) -> None:
        """The script has ended; note what has changed and is not ``covered`` by an optimizer."""
        with layouts_private.aside():
            changed = [
                (parameter, there)
                for key, (parameter, before, there) in self._first.items()
                if key not in covered and _is_changed(own_part(parameter).detach(), before)
            ]
        for there in sorted({there for _, there in changed}):
            shapes = [str(tuple(parameter.shape)) for parameter, where in changed if where == there]
            self._log.notes[
                f"{len(shapes)} parameters changed, of shape {shapes[0]} say, and no step of an optimizer was seen; "
                f"their module was first called at {there or 'a line that is not known'}"
            ] += 1


def _is_changed(now: Tensor, before: Tensor) -> bool:
    """Whether it is other than it was; not what FSDP had gathered by then and has freed, which nobody may read."""
    if now.layout is torch.strided and not is_there(now):
        return False
    return now.shape != before.shape or not bool(((now == before) | (now.isnan() & before.isnan())).all())
