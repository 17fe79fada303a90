"""What the imports behind a request change of the process: in place on its ranks, and nowhere else."""

from __future__ import annotations

from fsdpcheck import adapters
from fsdpcheck.execution import RunRequest
from fsdpcheck.loading import import_patches
from fsdpcheck.process_state import Change
from fsdpcheck.workload.user_model import loading as own_model


def of(request: RunRequest) -> list[Change]:
    """Load the adapter and the user's own model, if there is one; what their imports changed."""
    adapters.load(request.adapter)
    own = request.case.model.own
    if own is None:
        return import_patches.patches([request.adapter])
    own_model.load(own)
    return import_patches.patches([request.adapter, own.build, own.batch, own.loss])
