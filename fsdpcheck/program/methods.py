"""Methods of a trainer that a run calls."""

from __future__ import annotations

from collections.abc import Iterator

from fsdpcheck.adapters.vocabulary import OBSERVABLES
from fsdpcheck.execution import RunRequest

ASKED_BY: dict[str, str] = {
    "fsdpcheck.program.observers:padding": "shards",
    "fsdpcheck.program.observers:poison_padding": "shards",
    "fsdpcheck.program.observers:units": "units",
    "fsdpcheck.program.observers:held": "local_tensors",
    "fsdpcheck.program.observers:ordered_norms": "ordered_norms",
}
"""Observer -> the method of a trainer that it calls."""


def methods_for(request: RunRequest) -> Iterator[str]:
    """Methods of a trainer that a run calls; one may come twice."""
    observe, observers = request.observe, request.observers
    yield from ("step", "parameters")
    yield from (method for name, method in OBSERVABLES.items() if name in observe and name != "params")
    yield from (method for observer, method in ASKED_BY.items() if observer in observers)
    yield from ["save"] * bool(request.save_to) + ["load"] * bool(request.load_from)
