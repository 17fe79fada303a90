"""Strategies: what they may draw, how often they must draw it, and where shrinking ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import get_args

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.strategies import SearchStrategy

from fsdpcheck import layouts, strategies
from fsdpcheck.adapters._base import Features, Promise
from fsdpcheck.case import Arithmetic, Case, LayerSpec, ModelSpec, Trait
from fsdpcheck.floors import FLOORS, census

ALL: frozenset[Trait] = frozenset(get_args(Trait))
EVERYTHING = Features(frozenset(get_args(Promise)), ALL)
MINIMAL = Features(frozenset({"plain", "private"}))
Draw = Callable[[Features, Sequence[int]], SearchStrategy[Case]]
DRAWS: dict[str, Draw] = {
    "plain": strategies.plain,
    "global_norm": strategies.global_norm,
    "private_unclipped": strategies.private_unclipped,
    "private_exact": strategies.private_exact,
    "private_probe": strategies.private_probe,
}
EVERY = pytest.mark.parametrize("name", DRAWS)


def drawn(strategy: SearchStrategy[Case], count: int) -> tuple[Case, ...]:
    """``count`` draws, the same in every run."""
    found: list[Case] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)


@cache
def from_everything(name: str) -> tuple[Case, ...]:
    return drawn(DRAWS[name](EVERYTHING, strategies.WORLD_SIZES), 400)


@EVERY
def test_floors_are_reached(name: str) -> None:
    several = [case for case in from_everything(name) if case.world_size > 1]
    facts = [census(case) for case in several]
    shares = {fact: sum(found[fact] for found in facts) / len(facts) for fact in FLOORS}
    assert {fact: share for fact, share in shares.items() if share < FLOORS[fact]} == {}
    assert len(several) > 200


@EVERY
def test_everything_else_appears_regularly(name: str) -> None:
    facts = [census(case) for case in from_everything(name)]
    counts = {fact: sum(found[fact] for found in facts) for fact in facts[0]}
    absent = {"mean"} if name.startswith("private") else {"deferred"}
    assert {fact: count for fact, count in counts.items() if count < 4 and fact not in absent} == {}
    assert {case.world_size for case in from_everything(name)} == set(strategies.WORLD_SIZES)


@EVERY
def test_every_drawn_case_comes_back_from_json(name: str) -> None:
    for case in from_everything(name):
        assert Case.from_json(case.to_json()) == case
        assert case.describe()


@EVERY
def test_every_step_has_a_sample_and_stays_in_its_family(name: str) -> None:
    for case in from_everything(name):
        assert sum(case.local_sizes) > 0
        assert (
            tuple(len(layouts.indices(case, 0)[rank]) for rank in range(case.world_size))
            == (case.step.micro_batches,) * case.world_size
        )
        assert case.step.clipping == (name.removeprefix("private_") if name.startswith("private") else "none")
        assert (case.step.max_grad_norm is not None) == (name == "global_norm")
        assert case.step.contribution == "complete" or case.layout.kind == "replicated"


@EVERY
def test_drawing_twice_gives_the_same_cases(name: str) -> None:
    once = drawn(DRAWS[name](EVERYTHING, strategies.WORLD_SIZES), 30)
    assert once == drawn(DRAWS[name](EVERYTHING, strategies.WORLD_SIZES), 30)


@pytest.mark.parametrize("missing", sorted(ALL))
def test_what_is_not_accepted_is_never_drawn(missing: Trait) -> None:
    accepts = ALL - {missing}
    for case in drawn(strategies.cases(Features(EVERYTHING.promises, accepts)), 40):
        assert case.requires() <= accepts, case.describe()


@pytest.mark.parametrize("accepted", [None, *sorted(ALL)])
def test_an_adapter_that_accepts_next_to_nothing_has_cases(accepted: Trait | None) -> None:
    accepts: frozenset[Trait] = frozenset({accepted} if accepted else ())
    for case in drawn(strategies.cases(Features(MINIMAL.promises, accepts)), 25):
        assert case.requires() <= accepts, case.describe()


def test_promises_bound_what_is_drawn() -> None:
    for case in drawn(strategies.cases(Features(frozenset({"private"}), ALL)), 150):
        assert (case.step.norms, case.step.contribution) == ("immediate", "complete")
    every = from_everything("private_exact")
    assert {case.step.norms for case in every} == {"immediate", "deferred"}
    assert {case.step.contribution for case in every} == {"complete", "partial", "mixed"}


def test_arguments_narrow_the_draw() -> None:
    found = drawn(
        strategies.cases(
            EVERYTHING, clipping=("exact",), world_sizes=(3,), norms=("deferred",), contributions=("partial", "mixed")
        ),
        60,
    )
    assert {case.world_size for case in found} == {3}
    assert {case.step.norms for case in found} == {"deferred"}
    assert {case.step.contribution for case in found} == {"partial", "mixed"}
    limited = Features(EVERYTHING.promises, ALL, max_world_size=2)
    assert {case.world_size for case in drawn(strategies.plain(limited), 60)} == {1, 2}


def smallest(strategy: SearchStrategy[Case], wanted: Callable[[Case], bool]) -> Case:
    phases = [Phase.generate, Phase.shrink]  # "explain" would vary what was found
    quiet = settings(max_examples=2000, derandomize=True, database=None, deadline=None, phases=phases)
    return find(strategy, wanted, settings=quiet)


def test_two_units_on_two_ranks_shrink_to_the_smallest_such_case() -> None:
    case = smallest(strategies.plain(EVERYTHING), lambda case: case.world_size > 1 and len(case.model.units) > 1)
    assert case.world_size == 2
    assert case.model.units == (1, 1)
    assert [(layer.width, layer.bias, layer.activation, layer.frozen) for layer in case.model.layers] == [
        (1, False, "identity", "none")
    ] * len(case.model.layers)
    assert len(case.model.layers) + case.model.has_front == 2
    assert (case.layout.batch_size, case.step.steps, case.step.micro_batches, case.seed) == (1, 1, 1, 0)
    assert case.model.features <= 2


def test_clipping_with_momentum_shrinks_to_one_layer() -> None:
    case = smallest(
        strategies.private_exact(EVERYTHING),
        lambda case: case.step.optimizer.momentum > 0 and case.step.steps > 1 and "ragged" in case.requires(),
    )
    assert (case.world_size, len(case.model.layers), case.model.layers[0].width) == (2, 1, 1)
    assert (case.layout.batch_size, case.step.steps, case.step.clip_norm) == (1, 2, 1)
    assert case.step.optimizer.weight_decay == 0
    assert case.seed == 0


def test_anything_at_all_shrinks_to_the_smallest_case() -> None:
    case = smallest(strategies.plain(EVERYTHING), lambda case: True)
    assert case == Case(ModelSpec((LayerSpec(1),)), arithmetic=Arithmetic(project=False))
