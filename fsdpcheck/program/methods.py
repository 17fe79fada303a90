"""Methods of a trainer that a run calls."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpcheck.adapters.vocabulary import OBSERVABLES
from fsdpcheck.execution import RunRequest
from fsdpcheck.program import probe


def methods_for(request: RunRequest) -> Iterator[str]:
    """Methods of a trainer that a run calls; one may come twice."""
    yield from ("step", "parameters")
    yield from (method for name, method in OBSERVABLES.items() if name in request.observe and name != "params")
    yield from filter(None, (probe.load(name).calls for name in request.probes))
    yield from ["evaluate"] * (getattr(getattr(request.case, "step", None), "evaluates", "no") != "no")
    yield from ["thaw"] * getattr(getattr(request.case, "step", None), "thaws", False)
    yield from ["freeze"] * getattr(getattr(request.case, "step", None), "refreezes", False)
    yield from ["save"] * bool(request.save_to) + ["load"] * bool(request.load_from)
