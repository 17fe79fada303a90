"""What the imports behind a request change of the process: in place on its ranks, and nowhere else."""

from __future__ import annotations

from fsdpcheck import adapters
from fsdpcheck.case import user_model
from fsdpcheck.execution import RunRequest
from fsdpcheck.loading import import_patches
from fsdpcheck.process_state import Change
from fsdpcheck.workload.user_model import loading


def patches(request: RunRequest) -> list[Change]:
    """Load the adapter and the user's own model, if there is one; what their imports changed."""
    adapters.load(request.adapter)
    own = user_model(request.case)
    if own is not None:
        loading.load(own)
    return import_patches.patches(references(request))


def told(request: RunRequest) -> tuple[str, ...]:
    """The same in words, a sentence each, of what is loaded already."""
    return import_patches.told(references(request))


def references(request: RunRequest) -> tuple[str, ...]:
    """To the user's code that a request runs."""
    own = user_model(request.case)
    return (request.adapter, *(own.references if own is not None else ()))
