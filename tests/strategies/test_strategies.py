"""Strategies: what they may draw, how often they must draw it, and where shrinking ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.strategies import SearchStrategy

from fsdpcheck import adapters, oracle, strategies
from fsdpcheck.adapters.contract import ArithmeticRule, Features, Promise
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase, Trait, from_json
from fsdpcheck.compat.hypothesis_private import without_mutations
from fsdpcheck.errors import NotExact
from fsdpcheck.judging.coverage_minimums import FLOORS, census
from fsdpcheck.oracle import certificate
from fsdpcheck.strategies import enumeration
from fsdpcheck.workload import batches, models

ALL: frozenset[Trait] = frozenset(get_args(Trait))
EVERYTHING = Features(frozenset(get_args(Promise)), ALL)
MINIMAL = Features(frozenset({"plain", "private"}))
ANY = strategies.CaseSpace()
SPACES: dict[str, strategies.CaseSpace] = {
    "plain": strategies.PLAIN,
    "global_norm": strategies.GLOBAL_NORM,
    "private_unclipped": strategies.PRIVATE_UNCLIPPED,
    "private_exact": strategies.PRIVATE_EXACT,
    "private_probe": strategies.PRIVATE_PROBE,
}
EVERY = pytest.mark.parametrize("name", SPACES)
BY_DAY = ("plain", "private_exact")
"""Spaces of which many draws are asked by day: one of each kind of step."""


def drawn(strategy: SearchStrategy[TrainingCase], count: int) -> tuple[TrainingCase, ...]:
    """``count`` draws, the same in every run."""
    found: list[TrainingCase] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(strategy)
    def collect(case: TrainingCase) -> None:
        found.append(case)

    with without_mutations():
        collect()
    return tuple(found)


def test_the_mutator_is_where_it_is_looked_for_and_comes_back() -> None:
    name = "generate_mutations_from"
    before = getattr(ConjectureRunner, name)
    with without_mutations():
        assert getattr(ConjectureRunner, name) is not before
    assert getattr(ConjectureRunner, name) is before


DRAWN = 1000


def from_everything(name: str) -> tuple[TrainingCase, ...]:
    return drawn(strategies.cases_of(SPACES[name], EVERYTHING), DRAWN)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in SPACES]
)
def test_what_is_drawn_of_a_space(name: str) -> None:
    """One test for all that is asked of many draws: to draw them takes longer than to ask."""
    cases = from_everything(name)
    facts = [census(case) for case in cases]
    _floors_are_reached([found for case, found in zip(cases, facts, strict=True) if case.world_size > 1])
    _everything_else_appears_regularly(name, facts)
    assert {case.world_size for case in cases} == set(strategies.WORLD_SIZES)
    for case in cases:
        assert from_json(case.to_json()) == case
        assert case.describe()
        _has_a_sample_in_every_step_and_stays_in_its_family(name, case)
    assert {case.arithmetic.numbers for case in cases} == {"grid"}
    if name.startswith("private"):
        assert {case.step.norms for case in cases} == {"immediate", "deferred"}
        assert {case.step.contribution for case in cases} == {"complete", "partial", "mixed"}
    for case in cases[:60]:
        model, loss = models.build(case), models.loss_for(case)
        output = model(batches.inputs(case)[:2])
        loss(output, torch.zeros_like(output)).sum().backward()
        assert all(value.grad is None or value.grad.isfinite().all() for value in model.parameters()), case.describe()


def _floors_are_reached(facts: list[dict[str, bool]]) -> None:
    shares = {fact: sum(found[fact] for found in facts) / len(facts) for fact in FLOORS}
    assert {fact: share for fact, share in shares.items() if share < FLOORS[fact]} == {}
    assert len(facts) > DRAWN / 2


def _everything_else_appears_regularly(name: str, facts: list[dict[str, bool]]) -> None:
    counts = {fact: sum(found[fact] for found in facts) for fact in facts[0]}
    absent = {"mean"} if name.startswith("private") else {"deferred"}
    absent |= set() if name.startswith("private") else {"clipped by unit"}
    absent |= {"bfloat16", "TF32", "replicated shards"}  # drawn for laws of their own
    absent |= {"thawed", "tied apart"} if name.startswith("private") else set()  # in plain training
    absent |= {"matrix optimizer", "row optimizer"} if name != "plain" else set()  # which nothing clips
    absent |= {"premultiplied averages"} if name == "private_probe" else set()  # its factors are on no grid
    assert {fact: count for fact, count in counts.items() if count < 4 and fact not in absent} == {}


def _has_a_sample_in_every_step_and_stays_in_its_family(name: str, case: TrainingCase) -> None:
    assert sum(case.local_sizes) > 0
    micro_batches = [len(own) for own in batches.indices(case, 0)]
    assert micro_batches == [case.step.micro_batches] * case.world_size
    assert case.step.clipping == (name.removeprefix("private_") if name.startswith("private") else "none")
    assert (case.step.max_grad_norm is not None) == (name == "global_norm")
    assert case.step.contribution == "complete" or case.layout.kind == "replicated"


@EVERY
def test_drawing_twice_gives_the_same_cases(name: str) -> None:
    once = drawn(strategies.cases_of(SPACES[name], EVERYTHING), 30)
    assert once == drawn(strategies.cases_of(SPACES[name], EVERYTHING), 30)


@pytest.mark.parametrize("missing", sorted(ALL))
def test_what_is_not_accepted_is_never_drawn(missing: Trait) -> None:
    accepts = ALL - {missing}
    for case in drawn(strategies.cases_of(ANY, Features(EVERYTHING.promises, accepts)), 20):
        assert case.requires() <= accepts, case.describe()


@pytest.mark.parametrize("accepted", [None, *sorted(ALL)])
def test_an_adapter_that_accepts_next_to_nothing_has_cases(accepted: Trait | None) -> None:
    accepts: frozenset[Trait] = frozenset({accepted} if accepted else ())
    for case in drawn(strategies.cases_of(ANY, Features(MINIMAL.promises, accepts)), 10):
        assert case.requires() <= accepts, case.describe()


REAL = {"real": strategies.REAL, "real_private": strategies.REAL_PRIVATE}


@pytest.mark.parametrize("name", REAL)
def test_real_cases_keep_the_true_functions_and_are_never_projected(name: str) -> None:
    found = drawn(strategies.cases_of(REAL[name], EVERYTHING), 100)
    for case in found:
        assert (case.arithmetic.numbers, case.arithmetic.project) == ("real", False)
        assert case.requires().isdisjoint({"surrogates", "project"})
        assert case.step.clipping == ("probe" if name == "real_private" else "none")
    facts = [census(case) for case in found]
    for fact in ("convolution", "normalisation inside", "attention", "activation off the grid", "cross-entropy"):
        assert sum(found[fact] for found in facts) > 3, fact
    accepts = ALL - {"surrogates", "attention", "attention-private"}
    for case in drawn(strategies.cases_of(REAL[name], Features(EVERYTHING.promises, accepts), (3,)), 20):
        assert case.requires() <= accepts


@pytest.mark.parametrize("world", [6, 7, 8, 13])
@pytest.mark.parametrize("features", [EVERYTHING, MINIMAL], ids=["everything", "minimal"])
def test_larger_worlds_have_cases_and_shrink_to_their_smallest(features: Features, world: int) -> None:
    for space in SPACES.values():
        for case in drawn(strategies.cases_of(space, features, (world,)), 10):
            assert case.world_size == world
            assert case.requires() <= features.accepts
    case = smallest(strategies.cases_of(strategies.PLAIN, features, (1, world)), lambda case: case.world_size > 1)
    width = 1 if features is EVERYTHING else world
    batch = 1 if features is EVERYTHING else world
    assert case == TrainingCase(
        ModelSpec((LayerSpec(width),), units=() if features is EVERYTHING else (1,)),
        MeshSpec(world),
        BatchLayout(batch_size=batch),
        arithmetic=Arithmetic(project=False),
    )


def test_promises_bound_what_is_drawn() -> None:
    for case in drawn(strategies.cases_of(ANY, Features(frozenset({"private"}), ALL)), 60):
        assert (case.step.norms, case.step.contribution) == ("immediate", "complete")


def test_a_space_narrows_the_draw() -> None:
    space = strategies.PRIVATE_EXACT.but(norms=("deferred",), contributions=("partial", "mixed"))
    found = drawn(strategies.cases_of(space, EVERYTHING, (3,)), 60)
    assert {case.world_size for case in found} == {3}
    assert {case.step.norms for case in found} == {"deferred"}
    assert {case.step.contribution for case in found} == {"partial", "mixed"}
    limited = Features(EVERYTHING.promises, ALL, max_world_size=2)
    assert {case.world_size for case in drawn(strategies.cases_of(strategies.PLAIN, limited), 60)} == {1, 2}


def smallest(strategy: SearchStrategy[TrainingCase], wanted: Callable[[TrainingCase], bool]) -> TrainingCase:
    phases = [Phase.generate, Phase.shrink]  # "explain" would vary what was found
    quiet = settings(max_examples=2000, derandomize=True, database=None, deadline=None, phases=phases)
    return find(strategy, wanted, settings=quiet)


def test_two_units_on_two_ranks_shrink_to_the_smallest_such_case() -> None:
    case = smallest(
        strategies.cases_of(strategies.PLAIN, EVERYTHING),
        lambda case: case.world_size > 1 and len(case.model.units) > 1,
    )
    assert case.world_size == 2
    assert case.model.units == (1, 1)
    assert [(layer.width, layer.bias, layer.activation, layer.frozen) for layer in case.model.layers] == [
        (1, False, "identity", "none")
    ] * len(case.model.layers)
    assert len(case.model.layers) + case.model.has_front == 2
    assert (case.layout.batch_size, case.step.steps, case.step.micro_batches, case.seed) == (1, 1, 1, 0)
    assert case.model.features <= 2


def test_where_ranks_must_divide_rows_and_batch_two_ranks_are_still_the_smallest() -> None:
    few = Features(frozenset({"plain"}), frozenset({"bias"}))  # on four ranks, of all widths, only 4 is accepted
    case = smallest(strategies.cases_of(strategies.PLAIN, few, (1, 2, 3, 4, 5)), lambda case: case.world_size > 1)
    assert (case.world_size, case.model.layers[0].width, case.layout.batch_size, case.seed) == (2, 2, 2, 0)


def test_clipping_with_momentum_shrinks_to_one_layer() -> None:
    case = smallest(
        strategies.cases_of(strategies.PRIVATE_EXACT, EVERYTHING),
        lambda case: case.step.optimizer.momentum > 0 and case.step.steps > 1 and "ragged" in case.requires(),
    )
    assert (case.world_size, len(case.model.layers), case.model.layers[0].width) == (2, 1, 1)
    assert (case.layout.batch_size, case.step.steps, case.step.clip_norm) == (1, 2, 1)
    assert case.step.optimizer.weight_decay == 0
    assert case.seed == 0


def kind_is(kind: str) -> Callable[[TrainingCase], bool]:
    return lambda case: any(layer.kind == kind for layer in case.model.layers)


SMALLEST_OF: dict[str, tuple[Callable[[TrainingCase], bool], ModelSpec]] = {
    "conv": (kind_is("conv"), ModelSpec((LayerSpec(1, kind="conv"),), "signal", length=2)),
    "volume": (lambda case: case.model.input == "volume", ModelSpec((LayerSpec(1, kind="conv"),), "volume", length=2)),
    "layer_norm": (kind_is("layer_norm"), ModelSpec((LayerSpec(1, kind="layer_norm"),))),
    "rms_norm": (kind_is("rms_norm"), ModelSpec((LayerSpec(1, kind="rms_norm"),))),
    "attention": (kind_is("attention"), ModelSpec((LayerSpec(1, kind="attention"),), "sequence")),
    "bags": (lambda case: case.model.input == "bags", ModelSpec((LayerSpec(1),), "bags")),
    "silu": (
        lambda case: any(layer.activation == "silu" for layer in case.model.layers),
        ModelSpec((LayerSpec(1, activation="silu"),)),
    ),
    "group_norm": (
        kind_is("group_norm"),
        ModelSpec((LayerSpec(1, True, kind="group_norm"),), "signal", length=2),
    ),
}


@pytest.mark.parametrize("family", SMALLEST_OF)
def test_each_family_shrinks_to_its_smallest_model(family: str) -> None:
    wanted, model = SMALLEST_OF[family]
    case = smallest(strategies.cases_of(strategies.PLAIN, EVERYTHING), wanted)
    assert case == TrainingCase(model, arithmetic=Arithmetic(project=False))


FAMILIES = (
    "convolution", "bags", "normalisation inside", "attention", "activation off the grid", "cross-entropy", "float32",
    "several steps", "tied", "adam", "adamw",
)  # fmt: skip


@pytest.mark.nightly
def test_at_least_nine_drawn_cases_of_ten_are_proved_exact_in_every_family() -> None:
    accepted, rejected = Counter[str](), Counter[str]()
    for case in drawn(strategies.cases_of(ANY, EVERYTHING), 1200):
        try:
            certificate.prove(case, oracle.answer(case))
            counted = accepted
        except NotExact:
            counted = rejected
        counted.update(fact for fact, holds in census(case).items() if holds)
    assert min(accepted[family] for family in FAMILIES) > 8
    shares = {family: accepted[family] / (accepted[family] + rejected[family]) for family in FAMILIES}
    assert {family: share for family, share in shares.items() if share < 0.9} == {}


def test_anything_at_all_shrinks_to_the_smallest_case() -> None:
    case = smallest(strategies.cases_of(strategies.PLAIN, EVERYTHING), lambda case: True)
    assert case == TrainingCase(ModelSpec((LayerSpec(1),)), arithmetic=Arithmetic(project=False))


def test_some_cases_of_two_steps_are_not_projected_so_that_what_a_rank_hides_has_an_effect() -> None:
    features = adapters.load("reference").features
    several = [
        case
        for case in enumeration.distinct(strategies.cases_of(strategies.PLAIN, features), 60)
        if case.step.steps > 1
    ]
    hidden = [case for case in several if not case.arithmetic.project]
    assert 2 <= len(hidden) < len(several) / 2
    assert all(case.step.optimizer.kind == "sgd" and case.arithmetic.dtype == "float64" for case in hidden)


@pytest.mark.parametrize(
    ("promises", "families"),
    [
        (("plain",), {"none"}),
        (("private",), {"unclipped"}),
        (("private", "exact-factors"), {"unclipped", "exact"}),
        (("plain", "private", "exact-factors"), {"none", "unclipped", "exact"}),
    ],
)
def test_equal_bits_are_asked_of_the_families_in_which_they_are_promised(
    promises: tuple[Promise, ...], families: set[str]
) -> None:
    features = Features(frozenset(promises), accepts=MINIMAL.accepts)
    found = enumeration.distinct(strategies.cases_of(strategies.EQUAL_BITS, features), 40)
    assert {case.step.clipping for case in found} == families


def test_meshes_have_the_axes_of_an_adapter_and_no_others() -> None:
    both = replace(EVERYTHING, accepts=ALL - {"hsdp"}, axes=frozenset({"dp_shard", "tp"}))
    alone = replace(EVERYTHING, axes=frozenset({"tp"}), accepts=ALL - {"hsdp"})
    for features in (both, alone):
        found = drawn(strategies.cases_of(ANY, features, (1, 2, 4)), 60)
        assert all(features.takes(case) for case in found)
        seen = {tuple(case.mesh.sizes.items()) for case in found}
        single: set[tuple[tuple[str, int], ...]] = {(), (("tp", 2),), (("tp", 4),)}
        of_data = {(("dp_shard", 2),), (("dp_shard", 4),), (("dp_shard", 2), ("tp", 2))}
        assert seen == (single | of_data if features is both else single)


def test_who_averages_before_in_float32_and_after_each_micro_batch_does_so_on_powers_of_two() -> None:
    """As a loop of a user's own under DistributedDataParallel; factors of 9 and 25 would leave too few of 24 bits."""
    rule = ArithmeticRule("before", dtypes=("float32",))
    features = Features(frozenset({"plain"}), ALL - {"no-sync", "hsdp"}, arithmetic=rule)
    cases = drawn(strategies.cases_of(strategies.PLAIN, features, (2, 3, 4, 5)), 200)
    reduced = Counter(case.world_size for case in cases if case.step.reductions > 1)
    assert min(reduced[2], reduced[4]) > 5
    assert reduced.keys() == {2, 4}
