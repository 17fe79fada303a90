"""Meshes with axes that share out the model: who has which samples, and how a case tells them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fsdpcheck.adapter import ORDINARY, Features
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, from_json
from fsdpcheck.case.axes import AXES
from fsdpcheck.errors import InvalidCase
from fsdpcheck.oracle import answer
from fsdpcheck.strategies import metamorphic
from fsdpcheck.workload import batches

PLAIN = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(2), BatchLayout("contiguous", 4), StepSpec(normaliser=4))
TWO_AXES = dataclasses.replace(PLAIN, mesh=MeshSpec(2, axes=(("tp", 3),)))
ALONG_TP = dataclasses.replace(PLAIN, mesh=MeshSpec(axes=(("tp", 3),)))


def test_ranks_along_an_axis_of_the_model_have_the_same_samples() -> None:
    assert batches.indices(TWO_AXES, 0) == (((0, 1),),) * 3 + (((2, 3),),) * 3
    assert batches.indices(ALONG_TP, 0) == (((0, 1, 2, 3),),) * 3
    assert (TWO_AXES.copies, TWO_AXES.shares, TWO_AXES.local_sizes) == (3, 2, (2,) * 6)
    assert (ALONG_TP.copies, ALONG_TP.shares, ALONG_TP.local_sizes) == (3, 1, (4,) * 3)


@pytest.mark.parametrize(
    "layout",
    [
        BatchLayout("ragged", 4, counts=(3, 1)),
        BatchLayout("listed", 4, lists=((3,), (0, 1))),
        BatchLayout("sampler", 3),
        BatchLayout("strided", 4),
        BatchLayout("replicated", 2),
    ],
)
def test_every_layout_deals_out_among_data_ranks(layout: BatchLayout) -> None:
    wide, narrow = (dataclasses.replace(case, layout=layout) for case in (TWO_AXES, PLAIN))
    assert batches.indices(wide, 0)[::3] == batches.indices(narrow, 0)
    assert batches.logical_batch(wide, 0) == batches.logical_batch(narrow, 0)
    assert batches.batch(wide, 0, 0).loss_scale == batches.batch(narrow, 0, 0).loss_scale
    wraps = {"replicated"} if layout.kind == "replicated" else set()
    assert (wide.requires() ^ narrow.requires()) <= {"rows<ranks", "uneven-rows", *wraps}


def test_the_right_answer_is_that_of_the_same_batch_on_one_axis() -> None:
    wide, narrow = answer(dataclasses.replace(TWO_AXES, mesh=MeshSpec(2, axes=(("tp", 2),)))), answer(PLAIN)
    got, wanted = (one.steps[0].released for one in (wide, narrow))
    assert got.keys() == wanted.keys()
    assert all(got[name].tolist() == value.tolist() for name, value in wanted.items())


def test_a_case_has_its_axes_in_its_token_only_where_it_has_some() -> None:
    assert "axes" not in PLAIN.to_json()
    assert json.loads(TWO_AXES.to_json())["mesh"]["axes"] == [["tp", 3]]
    assert from_json(TWO_AXES.to_json()) == TWO_AXES
    assert "W = 6 (dp_shard 2 x tp 3)" in TWO_AXES.describe()
    assert "contiguous as 2+2" in TWO_AXES.describe()


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ((("tp", 1),), "mesh.axes tp"),
        ((("tp", 2), ("pp", 2)), "mesh.axes"),
        ((("tp", 2), ("tp", 2)), "mesh.axes"),
        ((("tp", 64),), "the world size"),
    ],
)
def test_axes_that_contradict_themselves_are_refused(axes: tuple[tuple[str, int], ...], said: str) -> None:
    with pytest.raises(InvalidCase, match=said):
        dataclasses.replace(PLAIN, mesh=MeshSpec(2, axes=axes))  # type: ignore[arg-type]


def test_ranks_are_numbered_with_the_last_axis_fastest() -> None:
    mesh = MeshSpec(2, 3, axes=(("pp", 2), ("tp", 2)))
    assert list(mesh.sizes) == [axis for axis in AXES if axis in mesh.sizes]
    assert mesh.sizes == {"dp_replicate": 3, "dp_shard": 2, "pp": 2, "tp": 2}
    assert (mesh.world_size, mesh.data_ranks, mesh.model_ranks, mesh.row_ranks) == (24, 6, 4, 4)


def test_who_has_not_the_axis_does_not_take_the_case() -> None:
    everything = Features(frozenset({"plain"}), ORDINARY)
    along_tp = dataclasses.replace(everything, axes=frozenset({"tp"}))
    both = dataclasses.replace(everything, axes=frozenset({"dp_shard", "tp"}))
    cases = (PLAIN, ALONG_TP, TWO_AXES, dataclasses.replace(PLAIN, mesh=MeshSpec(1, 2)))
    assert [everything.takes(case) for case in cases] == [True, False, False, True]
    assert [along_tp.takes(case) for case in cases] == [False, True, False, True]
    assert [both.takes(case) for case in cases] == [True, True, True, True]


def test_the_same_batch_on_another_mesh_has_no_axis_that_is_not_taken() -> None:
    along_tp = Features(frozenset({"plain"}), ORDINARY - {"hsdp"}, axes=frozenset({"tp"}))
    found = set()
    for seed in range(20):
        case = dataclasses.replace(ALONG_TP, seed=seed)
        first, other = metamorphic.at_another_world_size(case, along_tp)
        assert batches.logical_batch(first, 0) == batches.logical_batch(other, 0)
        found.add(other.mesh)
    assert found == {MeshSpec(), MeshSpec(axes=(("tp", 2),))}
