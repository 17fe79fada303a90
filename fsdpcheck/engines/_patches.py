"""What the imports behind a request change of the process: in place on its ranks, and nowhere else."""

from __future__ import annotations

from fsdpcheck import adapters
from fsdpcheck.execution import RunRequest
from fsdpcheck.own import model as own_model
from fsdpcheck.process_state import Change, imports


def of(request: RunRequest) -> list[Change]:
    """Load the adapter and the user's own model, if there is one; what their imports changed."""
    adapters.load(request.adapter)
    own = request.case.model.own
    if own is None:
        return imports.patches([request.adapter])
    own_model.load(own)
    return imports.patches([request.adapter, own.build, own.batch, own.loss])
