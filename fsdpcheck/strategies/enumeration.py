"""Cases in bulk, outside any law: for studies that count and measure."""

from __future__ import annotations

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy

from fsdpcheck.case import Case
from fsdpcheck.compat.hypothesis_private import without_local_constants, without_mutations


def distinct(strategy: SearchStrategy[Case], count: int, seed: int = 0) -> list[Case]:
    """The first ``count`` distinct cases of a strategy, the same on every machine for one ``seed``.

    Fewer when the strategy has no more, or repeats itself too often to find them.
    """
    cases: dict[Case, None] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=4 * count + 100,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if len(cases) < count:
            cases[case] = None

    with without_local_constants(), without_mutations():
        draw()
    return list(cases)
