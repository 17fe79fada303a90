"""What the imports behind a request change of the process: in place on its ranks, and nowhere else."""

from __future__ import annotations

from fsdpcheck import adapters
from fsdpcheck.execution import RunRequest
from fsdpcheck.loading import import_patches
from fsdpcheck.process_state import Change
from fsdpcheck.workload.user_model import loading as user_model


def patches(request: RunRequest) -> list[Change]:
    """Load the adapter and the user's own model, if there is one; what their imports changed."""
    adapters.load(request.adapter)
    if request.case.model.own is not None:
        user_model.load(request.case.model.own)
    return import_patches.patches(references(request))


def told(request: RunRequest) -> tuple[str, ...]:
    """The same in words, a sentence each, of what is loaded already."""
    return import_patches.told(references(request))


def references(request: RunRequest) -> tuple[str, ...]:
    """To the user's code that a request runs."""
    own = request.case.model.own
    return (request.adapter,) if own is None else (request.adapter, own.build, own.batch, own.loss)
