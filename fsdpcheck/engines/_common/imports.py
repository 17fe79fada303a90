"""What the imports behind a request change of the process: in place on its ranks, and nowhere else."""

from __future__ import annotations

from fsdpcheck import adapters, process_state
from fsdpcheck.case import user_model
from fsdpcheck.execution import RunRequest
from fsdpcheck.loading import import_patches
from fsdpcheck.process_state import Change
from fsdpcheck.workload.user_model import loading

_imported: set[tuple[str, ...]] = set()


def patches(request: RunRequest) -> list[Change]:
    """Load the adapter and the user's own model, if there is one; what their imports changed."""
    behind = references(request)
    if behind not in _imported:
        with process_state.undisturbed(False):
            _load(request)
        _imported.add(behind)
    return import_patches.patches(behind)


def _load(request: RunRequest) -> None:
    adapters.load(request.adapter)
    own = user_model(request.case)
    if own is not None:
        loading.load(own)


def told(request: RunRequest) -> tuple[str, ...]:
    """The same in words, a sentence each, of what is loaded already."""
    return import_patches.told(references(request))


def references(request: RunRequest) -> tuple[str, ...]:
    """To the user's code that a request runs."""
    own = user_model(request.case)
    return (request.adapter, *(own.references if own is not None else ()))
