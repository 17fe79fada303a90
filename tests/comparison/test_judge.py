"""The judge of one number of ranks: how much noise it asks for before it accuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.decision import Noise
from fsdpcheck.comparison.judge import CONFIRMING, NOISY, Judge, Pair
from fsdpcheck.comparison.kept_runs import Runs, with_noise
from fsdpcheck.comparison.record import Key, Observation
from fsdpcheck.comparison.runs import Run
from fsdpcheck.execution import Failure
from fsdpcheck.simulation.simulate import Options
from tests.comparison import observed

_KEY = Key(0, "gradient", "w")
_NOISE = 1e-15


@dataclass
class _Runs(Runs):
    """Runs that are there: of W ranks the gradient is 1 + (W - 1) * apart, and noise moves it by _NOISE."""

    apart: float = 0.0
    failing: frozenset[Run] = frozenset()
    asked: list[int] = field(default_factory=list)
    noisy: float = _NOISE
    own: dict[int, float] = field(default_factory=dict)
    """In the script's own precision: by number of ranks how far rounding moves the gradient, and noise."""

    def get(self, wanted) -> None:  # type: ignore[no-untyped-def]
        for run in wanted:
            value = 1.0 + (run.world_size - 1) * self.apart
            if run.arithmetic.precision == "own":
                value += self.own.get(run.world_size, 0.0)
            there = observed.observation(*(observed.rank({_KEY: [value, 0.5]}) for _ in range(run.world_size)))
            failure = Failure("exception", "ValueError: no") if run in self.failing else None
            self.done[run] = Observation(run.world_size, there.ranks, there.traces, failure)

    def noise(self, pair: Pair, many: int) -> Noise:
        self.asked.append(many)
        if pair[0].arithmetic.precision == "own":
            return Noise({_KEY: max(self.own.get(run.world_size, 0.0) for run in pair)}, many)
        return Noise({_KEY: self.noisy}, max(many, 1))


def _judge(apart: float, failing: Mapping[Run, object] | tuple[Run, ...] = ()) -> tuple[Judge, _Runs]:
    runs = _Runs(read("train.py"), Options(), apart=apart, failing=frozenset(failing))
    judge = Judge(runs, 2, 1e-6)
    runs.get([*judge.own, *judge.raised])
    return judge, runs


@pytest.mark.parametrize(
    ("apart", "says", "asked"),
    [
        (0.0, "agrees", {0}),
        (1e-14, "agrees", {NOISY}),
        (1e-2, "differs", {NOISY}),
        (1e-10, "differs", {NOISY, NOISY + CONFIRMING}),
    ],
)
def test_more_noise_is_asked_for_where_one_noisy_run_would_not_show_the_difference(
    apart: float, says: str, asked: set[int]
) -> None:
    judge, runs = _judge(apart)
    world = judge.world()
    assert (world.says, set(runs.asked)) == (says, asked)


@pytest.mark.parametrize(
    ("noise", "apart", "says", "asked"),
    [
        (1e-9, 1e-10, "agrees", {NOISY, NOISY + CONFIRMING}),
        (1e-9, 2e-7, "differs", {NOISY, NOISY + CONFIRMING}),
        (1e-7, 1e-10, "undecidable", {NOISY}),
    ],
)
def test_more_noise_is_asked_for_where_it_decides(noise: float, apart: float, says: str, asked: set[int]) -> None:
    judge, runs = _judge(apart)
    runs.noisy = noise
    runs.get(noisy for run in judge.raised for noisy in with_noise(run, NOISY))
    world = judge.world()
    assert (world.says, set(runs.asked)) == (says, asked)


def test_a_world_that_fails_is_told_and_one_that_fails_in_float64_is_undecidable() -> None:
    own, raised = (pair[1] for pair in (_judge(0.0)[0].own, _judge(0.0)[0].raised))
    assert _judge(0.0, (own,))[0].world().says == "fails"
    world = _judge(0.0, (raised,))[0].world()
    assert (world.says, world.causes[0].text) == ("undecidable", "in float64 it fails: ValueError: no")


def test_a_world_that_fails_with_noise_alone_is_undecidable_and_says_so() -> None:
    noisy = with_noise(_judge(0.0)[0].raised[1], NOISY)
    judge, runs = _judge(1e-10, noisy)
    runs.noisy = 1.0
    runs.get(noisy)
    world = judge.world()
    assert (world.says, world.causes[0].text) == ("undecidable", "with noise of rounding it fails: ValueError: no")


@pytest.mark.parametrize(("noise", "why"), [({1: 1e-2, 2: 2e-2}, ""), ({1: 1e-7, 2: 2e-2}, "lower precision")])
def test_noise_that_moves_more_ranks_much_further_is_a_lower_precision(noise: dict[int, float], why: str) -> None:
    judge, runs = _judge(0.0)
    runs.own = {**noise, 2: noise[2]}
    runs.get([*judge.own, *judge.raised])
    precision = judge.world().precision
    assert (precision.why if precision is not None else "") == why
