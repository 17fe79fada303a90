"""Siblings: other cases with the same right answer, and never one that an implementation does not accept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch

from fsdpcheck import oracle, strategies
from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.checks.invariance import local_name
from fsdpcheck.errors import NotExact
from fsdpcheck.strategies import enumeration, metamorphic
from fsdpcheck.workload import batches, models
from fsdpcheck.workload.clip_groups import is_instrument
from tests.common.answers import proved
from tests.common.tables import each

EVERYTHING = Features(frozenset(get_args(Promise)), frozenset(get_args(Trait)) - {"real"})
NOTHING = Features(frozenset({"plain"}))
Relation = Callable[[TrainingCase, Features], metamorphic.Pair]
RELATIONS: list[Relation] = [
    metamorphic.at_another_world_size,
    metamorphic.for_resharding,
    metamorphic.with_other_units,
    metamorphic.with_other_reshard,
    metamorphic.with_samples_reordered,
    metamorphic.with_other_micro_batches,
]


def body(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {local_name(name): value for name, value in parameters.items() if not is_instrument(name)}


@cache
def drawn() -> list[TrainingCase]:
    space = strategies.CaseSpace(clipping=("none", "unclipped", "exact"))
    return enumeration.distinct(strategies.cases_of(space, EVERYTHING), 20)


@pytest.mark.nightly
@each("relation", RELATIONS)
def test_siblings_are_other_cases_with_the_same_right_answer(relation: Relation) -> None:
    compared = 0
    for case in drawn():
        try:
            first, second = relation(case, EVERYTHING)
        except NotExact:
            continue
        answer, other = proved(first), proved(second)
        if answer is None or other is None:
            continue
        compared += 1
        assert first != second
        for k, (one, two) in enumerate(zip(answer.steps, other.steps, strict=True)):
            assert batches.logical_batch(first, k) == batches.logical_batch(second, k)
            mine, theirs = body(one.after), body(two.after)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert compared >= 10


@cache
def bare() -> list[TrainingCase]:
    return enumeration.distinct(strategies.cases_of(strategies.PLAIN, NOTHING), 30)


@each("relation", RELATIONS)
def test_what_is_not_accepted_is_no_sibling(relation: Relation) -> None:
    seen = 0
    for case in bare():
        try:
            assert relation(case, NOTHING)[1].requires() <= NOTHING.accepts
        except NotExact as error:
            seen += "no sibling" in str(error)
    allowed = {metamorphic.with_other_reshard, metamorphic.with_other_micro_batches}
    assert seen == 30 if relation in allowed else seen < 30


def test_one_rank_has_a_sibling_on_several_where_rows_may_be_uneven() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(3),)), MeshSpec(3), BatchLayout("sampler", 4), StepSpec(normaliser=2))
    first, second = metamorphic.at_another_world_size(case, EVERYTHING)
    assert first.step.normaliser == 6
    assert second.world_size != 3
    assert sorted(i for own in second.layout.lists for i in own) == [0, 0, 1, 1, 2, 3]
    limited = replace(EVERYTHING, max_world_size=1)
    assert metamorphic.at_another_world_size(case, limited)[1].world_size == 1


def test_a_training_goes_on_at_up_to_sixteen_ranks_with_parameters_of_the_same_shapes() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(3),)), MeshSpec(3), BatchLayout("sampler", 4), StepSpec(normaliser=2))
    writes, reads = set(), set()
    for seed in range(60):
        first, second = metamorphic.for_resharding(replace(case, seed=seed), EVERYTHING)
        assert models.parameter_shapes(first) == models.parameter_shapes(second)
        assert (first.mesh.goes_on_at, second.mesh.goes_on_at) == (second.world_size, first.world_size)
        assert (first.world_size == 16) == metamorphic.many_write(replace(case, seed=seed))
        writes.add(first.world_size)
        reads.add(second.world_size)
    assert {1, 2, 4, 5, 6, 8, 16} <= reads
    assert writes == {3, 16}
    assert metamorphic.for_resharding(case, EVERYTHING)[1].world_size == 1, "the smallest, for a seed of 0"


def test_in_replicas_has_the_same_right_answer_with_a_part_for_each_replica() -> None:
    compared = 0
    several = strategies.cases_of(strategies.PRIVATE_UNCLIPPED.but(replicated=True), EVERYTHING, (4, 6))
    for case in enumeration.distinct(several, 20):
        other = metamorphic.in_replicas(case)
        assert "replicated-shards" in other.requires()
        assert (other.world_size, other.copies) == (case.world_size, other.mesh.dp_shard)
        one, two = oracle.answer(case), oracle.answer(other)
        scaled = models.loss_scale(case) != models.loss_scale(other)  # then they train on from other parameters
        for first, second in list(zip(one.steps, two.steps, strict=True))[: 1 if scaled else None]:
            assert first.used.keys() == second.used.keys()  # a layer that all samples left out has none
            for name in first.used:
                mine, theirs = first.used[name] / models.loss_scale(case), second.used[name] / models.loss_scale(other)
                assert torch.equal(mine, theirs), name
            compared += 1
    assert compared >= 20


def test_a_prime_number_of_ranks_is_no_replicas_of_several() -> None:
    case = TrainingCase(ModelSpec((LayerSpec(3),)), MeshSpec(5), BatchLayout("replicated", 4))
    assert metamorphic.in_replicas(case) is case
