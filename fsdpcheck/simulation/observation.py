"""What a rank's own dispatch modes and profilers see of its collectives: what they see of real ones.

Torch hands a call on a group to an operator of c10d, which modes see, and a backend records an event, "gloo:all_reduce"
say. A group in Python is called before all that. So where something watches, the call is made on a plain group beside
it too, which makes nothing of it, and on this one where nothing sees how ranks meet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdpcheck.compat import groups_private
from fsdpcheck.compat.observers_private import Bottom, Event, is_observed, is_profiled, unobserved
from fsdpcheck.execution.forms import canonical, is_canonical
from fsdpcheck.simulation.backend import BackendAnswers
from fsdpcheck.simulation.rendezvous import Meeting
from fsdpcheck.simulation.work import MetWork

_EVENTS: Final[dict[str, tuple[str, int]]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "barrier": ("barrier", 1),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recvAnySource", 0),
    "monitored_barrier": ("", 0),
}
"""By method, what its event is called, if it has one, and which argument has its tensors (ProcessGroupGloo.cpp)."""


class ObservedMeeting(BackendAnswers, Meeting):
    """A meeting whose calls are seen by what observes the rank."""

    _plain: Any = None

    def _get_backend(self, device: torch.device) -> ObservedMeeting:
        """Raises RuntimeError where torch does: for a device that the group is not for."""
        if torch.device(device.type) not in self._device_types:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self.calls

    def _set_sequence_number_for_group(self) -> None:
        """It is counted from the first call on."""

    def _show(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[bool, Any]:
        """Show a call to modes and profilers; whether it came through to be made, and if not, what they gave for it."""
        if self._plain is None:
            self._plain = cast(Any, dist.ProcessGroup)(self._group_rank, self._group_size)
            self._plain._set_group_name(self.group_name)
        bottom = Bottom()
        with bottom.in_place():
            instead = getattr(self._plain, name)(*args, **options)
        return bottom.reached, instead

    def _recorded(self, title: str, place: int, args: tuple[Any, ...], perform: Callable[[], Any]) -> Any:
        event = self._event(title, place, args) if title and is_profiled() else None
        with unobserved():
            work = perform()
        if event is not None and isinstance(work, MetWork):
            work.after = event.end
        return work

    def _event(self, title: str, place: int, args: tuple[Any, ...]) -> Event:
        tensors = list(_flat(args[place])) if place < len(args) else []
        if title == "scatter":  # gloo shows what the root sends, and nothing of the others
            tensors = list(args[place][0]) if args[place] else []
        return Event(f"{groups_private.backend_on_cpu(self)}:{title}", tensors)


def _flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for inner in tensors:
            yield from _flat(inner)


def _observed(name: str, perform: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(perform)
    def method(self: ObservedMeeting, *args: Any, **options: Any) -> Any:
        if not is_canonical(name, args, options):
            args, options = canonical(name, args, options), {}
        if not is_observed():
            return perform(self, *args, **options)
        reached, instead = self._show(name, args, options)
        if not reached:
            return instead
        return self._recorded(*_EVENTS[name], args, lambda: perform(self, *args, **options))

    return method


for _name in _EVENTS:
    setattr(ObservedMeeting, _name, _observed(_name, getattr(Meeting, _name)))
