"""Layouts against torch's own DistributedSampler, against the definition of the logical batch, and the data set."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DistributedSampler

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, LayoutKind, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.workload import batches, models
from tests.common.tables import each

MODEL = ModelSpec((LayerSpec(2),), features=3)


def case_of(layout: BatchLayout, world: int, **step: int) -> TrainingCase:
    return TrainingCase(MODEL, MeshSpec(world), layout, StepSpec(**step))  # type: ignore[arg-type]


@each("drop_last", [False, True])
@each("world", range(1, 7))
def test_sampler_is_the_distributed_sampler(world: int, drop_last: bool) -> None:
    for size in range(1, 14):
        case = case_of(BatchLayout("sampler", size, drop_last=drop_last), world)
        for rank in range(world):
            real = DistributedSampler(range(size), world, rank, shuffle=False, drop_last=drop_last)  # type: ignore[arg-type]
            assert batches.indices(case, 0)[rank] == (tuple(real),), (size, rank)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_shuffled_sampler_has_the_counts_of_the_plain_one(drop_last: bool) -> None:
    plain = case_of(BatchLayout("sampler", 7, drop_last=drop_last), 3, steps=2)
    shuffled = replace(plain, layout=replace(plain.layout, shuffle=True))
    for step in range(2):
        one, other = batches.logical_batch(plain, step), batches.logical_batch(shuffled, step)
        assert sorted(one.values()) == sorted(other.values())
        assert set(other) <= set(range(7 * step, 7 * step + 7))
    orders = [[index % 7 for rank in batches.indices(shuffled, step) for index in rank[0]] for step in range(2)]
    assert orders[0] != orders[1]


@each("kind", ["contiguous", "strided"])
@each("world", [1, 2, 3, 5])
def test_blocks_and_strides_partition_the_batch(kind: LayoutKind, world: int) -> None:
    for size in range(1, 10):
        case = case_of(BatchLayout(kind, size), world, steps=2)
        assert batches.logical_batch(case, 1) == Counter(range(size, 2 * size))
        sizes = [len(rank[0]) for rank in batches.indices(case, 1)]
        assert sizes == list(case.local_sizes)
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("seed", "fewer"), [(0, [1, 3]), (1, [0, 2, 4])])
def test_some_ranks_have_one_micro_batch_fewer_and_all_of_their_samples(seed: int, fewer: list[int]) -> None:
    step = StepSpec(steps=2, micro_batches=3, sync_every=False, unequal=True)
    case = TrainingCase(MODEL, MeshSpec(5), BatchLayout("contiguous", 24), step, seed=seed)
    equal = replace(case, step=replace(step, unequal=False))
    assert [rank for rank in range(5) if case.has_fewer(rank)] == fewer
    for rank, (chunks, others) in enumerate(zip(batches.indices(case, 1), batches.indices(equal, 1), strict=True)):
        assert [i for chunk in chunks for i in chunk] == [i for chunk in others for i in chunk]
        given = batches.batch(case, 1, rank).micro_batches
        assert [micro.indices for micro in given] == list(chunks[: 3 - (rank in fewer)])
        assert all(len(micro.inputs) for micro in given)
    assert batches.logical_batch(case, 1) == batches.logical_batch(equal, 1)


def test_ranks_that_share_out_one_model_have_as_many_micro_batches_as_each_other() -> None:
    mesh = MeshSpec(2, axes=(("tp", 2),))
    step = StepSpec(micro_batches=2, sync_every=False, unequal=True)
    case = TrainingCase(MODEL, mesh, BatchLayout("contiguous", 4), step)
    assert [case.has_fewer(rank) for rank in range(4)] == [False, False, True, True]


def test_a_share_is_what_the_average_over_ranks_makes_right_or_else_their_sum() -> None:
    step = StepSpec(normaliser=8)
    own = TrainingCase(MODEL, MeshSpec(2, axes=(("tp", 2),)), BatchLayout("contiguous", 4), step)
    alike = TrainingCase(MODEL, MeshSpec(4), BatchLayout("replicated", 4), step)
    assert [batches.share(own, averages) for averages in (True, False)] == [2 / 8, 1 / 8]
    assert [batches.share(alike, averages) for averages in (True, False)] == [1 / 8, 1 / 32]
    assert batches.batch(own, 0, 0, averages=False).loss_scale == 1 / 8


def test_contiguous_is_blocks_and_strided_is_every_wth() -> None:
    assert batches.indices(case_of(BatchLayout("contiguous", 5), 2), 0) == (((0, 1, 2),), ((3, 4),))
    assert batches.indices(case_of(BatchLayout("strided", 5), 2), 0) == (((0, 2, 4),), ((1, 3),))


def test_listed_follows_the_lists_at_every_step() -> None:
    case = case_of(BatchLayout("listed", 3, lists=((2, 0), (2,))), 2, steps=2, micro_batches=2)
    assert batches.indices(case, 0) == (((2,), (0,)), ((2,), ()))
    assert batches.indices(case, 1) == (((5,), (3,)), ((5,), ()))
    assert batches.logical_batch(case, 1) == Counter({3: 1, 5: 2})
    assert {"wrap-around", "ragged", "empty-rank"} <= case.requires()


def test_a_replicated_batch_may_have_one_list() -> None:
    case = case_of(BatchLayout("replicated", 3, lists=((2, 0),)), 2)
    assert batches.indices(case, 0) == (((2, 0),), ((2, 0),))
    assert batches.logical_batch(case, 0) == Counter({0: 1, 2: 1})
    assert case.local_sizes == (2, 2)


def test_by_replica_gives_the_ranks_of_each_replica_one_list() -> None:
    layout = BatchLayout("by-replica", 3, lists=((2, 0), (1,), ()))
    case = replace(case_of(BatchLayout("contiguous", 3), 6, normaliser=4), mesh=MeshSpec(2, 3), layout=layout)
    assert [rank[0] for rank in batches.indices(case, 0)] == [(2, 0), (2, 0), (1,), (1,), (), ()]
    assert case.local_sizes == (2, 2, 1, 1, 0, 0)
    assert (case.copies, case.shares) == (2, 3)
    assert batches.logical_batch(case, 0) == Counter({0: 1, 1: 1, 2: 1})
    assert batches.batch(case, 0, 5).loss_scale == 3 / 4


def test_ragged_follows_the_counts() -> None:
    case = case_of(BatchLayout("ragged", 4, counts=(0, 3, 1)), 3)
    assert batches.indices(case, 0) == (((),), ((0, 1, 2),), ((3,),))


def test_a_replicated_batch_is_counted_once() -> None:
    case = case_of(BatchLayout("replicated", 3), 4)
    assert batches.indices(case, 0) == (((0, 1, 2),),) * 4
    assert batches.logical_batch(case, 0) == Counter(range(3))


def test_wrap_around_duplicates_count_with_multiplicity() -> None:
    case = case_of(BatchLayout("sampler", 4), 3)
    assert batches.logical_batch(case, 0) == Counter({0: 2, 1: 2, 2: 1, 3: 1})


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_micro_batches_are_near_equal_consecutive_chunks(count: int) -> None:
    for size in range(1, 8):
        case = case_of(BatchLayout("contiguous", size), 1, micro_batches=count)
        (chunks,) = batches.indices(case, 0)
        assert len(chunks) == count
        assert [index for chunk in chunks for index in chunk] == list(range(size))
        assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    case = case_of(BatchLayout("contiguous", 5), 1, micro_batches=3)
    assert batches.indices(case, 0) == (((0, 1), (2, 3), (4,)),)


def test_a_batch_packs_targets_and_scale() -> None:
    case = case_of(BatchLayout("contiguous", 4), 2, steps=2, normaliser=8)
    instrument = torch.arange(2 * 8 * 4, dtype=torch.float64).reshape(2, 8, 4)
    batch = batches.batch(case, 1, 1, instrument)
    (micro,) = batch.micro_batches
    assert micro.indices == (6, 7)
    assert batch.loss_scale == 2 / 8
    assert batch.size == 2
    assert torch.equal(micro.inputs, batches.inputs(case)[6:8])
    assert torch.equal(micro.targets, torch.cat([batches.targets(case)[6:8], instrument[1, 6:8]], dim=1))


def test_a_replicated_batch_is_scaled_by_one_over_n() -> None:
    batch = batches.batch(case_of(BatchLayout("replicated", 2), 4, normaliser=2), 0, 3)
    assert batch.loss_scale == 0.5
    assert not batch.micro_batches[0].targets[:, 2:].any()


def test_an_empty_rank_gets_an_empty_micro_batch() -> None:
    case = case_of(BatchLayout("ragged", 2, counts=(2, 0)), 2)
    (micro,) = batches.batch(case, 0, 1).micro_batches
    assert micro.inputs.shape == (0, 3)
    assert micro.targets.shape == (0, 2 + models.instrument_rows(case))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (ModelSpec((LayerSpec(2),), features=3), (6, 3)),
        (ModelSpec((LayerSpec(2),), "sequence", features=3, length=4), (6, 4, 3)),
        (ModelSpec((LayerSpec(2),), "tokens", length=4, vocabulary=5), (6, 4)),
    ],
)
def test_the_data_set_covers_all_steps(spec: ModelSpec, shape: tuple[int, ...]) -> None:
    case = TrainingCase(spec, layout=BatchLayout(batch_size=3), step=StepSpec(steps=2), arithmetic=Arithmetic(inputs=2))
    inputs, targets = batches.inputs(case), batches.targets(case)
    assert tuple(inputs.shape) == shape
    assert targets.shape == (6, models.body_features(case))
    assert targets.abs().max() <= 3
    if spec.input == "tokens":
        assert inputs.dtype == torch.int64
        assert 0 <= int(inputs.min()) <= int(inputs.max()) < 5
    else:
        assert inputs.abs().max() <= 2
        assert torch.equal(inputs, inputs.round())


@pytest.mark.parametrize("kind", ["vector", "sequence"])
@pytest.mark.parametrize("features", [2, 4, 8])
def test_rows_before_a_layer_norm_are_balanced(kind: str, features: int) -> None:
    spec = ModelSpec((LayerSpec(2),), kind, features=features, length=3 if kind == "sequence" else 1, layer_norm=True)  # type: ignore[arg-type]
    inputs = batches.inputs(TrainingCase(spec, layout=BatchLayout(batch_size=40), arithmetic=Arithmetic(inputs=5)))
    rows = inputs.reshape(-1, features)
    assert not rows.sum(1).any()
    assert (rows.abs() == rows[:, :1].abs()).all()
    assert set(rows.abs().unique().tolist()) == {1.0, 2.0, 4.0}
