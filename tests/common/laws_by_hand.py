"""Laws, cases and an engine made up, for tests of what becomes of a law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from fsdpcheck import adapters
from fsdpcheck.adapters.contract import Features
from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.execution import Execution, Failure, RunRequest
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import BuiltSpace


class FakeEngine:
    """Gives the failure it is told to give; no rank runs."""

    name = kind = "simulated"

    def __init__(self, failure: Failure | None = None) -> None:
        self.failure, self.requests = failure, list[RunRequest]()

    def run(self, request: RunRequest) -> Execution:
        self.requests.append(request)
        return Execution(self.name, request, [], self.failure, install_hits=dict.fromkeys(request.installs, 0))

    def declared(self, reference: str) -> Declaration:
        return adapters.declared(reference)

    def settle(self) -> tuple[str, ...]:
        return ()

    def close(self) -> None:
        pass


def a_case(world: int, batch: int, seed: int = 0) -> TrainingCase:
    return TrainingCase(
        model=ModelSpec(layers=(LayerSpec(width=1),)),
        mesh=MeshSpec(dp_shard=world),
        layout=BatchLayout(batch_size=batch),
        arithmetic=Arithmetic(project=False),
        seed=seed,
    )


def draw(features: Features, world_sizes: tuple[int, ...]) -> st.SearchStrategy[TrainingCase]:
    return st.builds(a_case, st.sampled_from(world_sizes), st.integers(1, 8), st.integers(0, 1000))


SPACE = BuiltSpace(build=draw)


def a_law(body: Callable[[TrainingCase, Run], None], **changes: Any) -> Law:
    fields = {"name": "fake.law", "promise": "plain", "observe": frozenset({"params"}), "space": SPACE}
    fields |= {"needs_traits": frozenset(), "body": body, "statement": "A law\nin words.\n\nMore.", "where": "here:1"}
    return Law(**{**fields, **changes})


def too_large(case: TrainingCase, run: Run) -> None:
    if case.layout.batch_size > 3:
        raise Violation("too large", got=str(case.layout.batch_size), wanted="<= 3", where="layout")
