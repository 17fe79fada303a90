"""Rows of the ledger: each verdict becomes another when the thing it speaks of is broken, or its numbers change."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fsdpcheck.studies.claims import registry, section_a, section_d_steps, section_e
from fsdpcheck.studies.claims.lab import impl
from fsdpcheck.studies.claims.registry import HOLDS, NEEDS_GPU, REFUTED, Outcome
from tests.common.tables import each
from tests.studies.claims.changes import CHANGES, CHANGES_OF_FSDP2, Change

Measure = Callable[[str], Outcome]
Verdict = Callable[[str], str]

FAULTS = [
    ("A1", "partial_norms_not_summed"),
    ("A1", "owned_part_off_by_one"),
    ("A2", "partial_norms_not_summed"),
    ("A3", "gathered_norms_left_in_rank_order"),
    ("A6", "sample_dropped_in_second_pass"),
    ("B1", "large_units_in_low_precision"),
    ("B2", "averaged_twice"),
    ("B4'", "padding_read_by_global_norm"),
    ("B5", "averaged_twice"),
    ("B5", "summed_not_averaged"),
    ("B8", "summed_not_averaged"),
    ("C1", "empty_rank_skips_its_collectives"),
    ("C2", "deferred_norms_are_stale"),
    ("C6", "empty_rank_skips_its_collectives"),
]


ONE_RANK = "fsdpcheck.studies.claims.section_a_one_rank"
FEWER = {
    "A6": {f"{ONE_RANK}._PLAINLY": ("reference",), f"{ONE_RANK}._PRIVATELY": ("reference",)},
    "C1": {"fsdpcheck.studies.claims.section_c.MODES": ("ghost",)},
    "C2": {"fsdpcheck.studies.claims.section_c.MODES": ("ghost",)},
}
"""Rows that runs of many kinds must not refute, and fewer kinds, of which one that goes wrong refutes the row too."""


def run_fewer(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, kinds in FEWER.get(id, {}).items():
        monkeypatch.setattr(place, kinds)


@each("id", FEWER)
def test_fewer_runs_alone_refute_nothing(measured: Measure, id: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        run_fewer(id, patched)
        assert measured(id).verdict.startswith(HOLDS)


@pytest.mark.parametrize(("id", "fault"), FAULTS)
def test_a_planted_fault_refutes_the_claim(
    verdict_before: Verdict, measured: Measure, id: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_before(id).startswith(HOLDS)
    run_fewer(id, monkeypatch)
    with impl("faults").install(fault) as planted:
        assert measured(id).verdict == REFUTED
    assert planted.hits > 0


@pytest.mark.parametrize("change", CHANGES + CHANGES_OF_FSDP2, ids=lambda one: f"{one.id}-{one.attribute}")
def test_a_change_changes_the_verdict(
    verdict_before: Verdict, measured: Measure, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = verdict_before(change.id)
    if change.verdict == REFUTED:
        run_fewer(change.id, monkeypatch)
    module, _, name = change.place.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, name) if name else owner
    monkeypatch.setattr(owner, change.attribute, change.changed(getattr(owner, change.attribute)))
    assert before != change.verdict
    assert measured(change.id).verdict == change.verdict


def test_the_worked_example_with_right_numbers(
    verdict_before: Verdict, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {0: ([[3.0] * 6, [1.0] * 6, [0.0] * 6], [54.0, 6.0, 0.0]), 1: ([[1.0] * 6] * 3, [6.0, 6.0, 6.0])}
    assert verdict_before("A7") == REFUTED
    monkeypatch.setattr(section_a, "_ROWS", rows)
    monkeypatch.setattr(section_a, "_TOTALS", [60.0, 12.0, 6.0])
    assert measured("A7").verdict == HOLDS


def test_one_call_for_norms_is_counted(
    verdict_before: Verdict, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    aggregate = impl("clipping.norm_aggregation")
    once = aggregate.sum_over
    assert verdict_before("A8") != REFUTED
    monkeypatch.setattr(aggregate, "sum_over", lambda partial, axis: once(once(partial, axis) / axis.size, axis))
    assert measured("A8").verdict == REFUTED


def test_a_mode_that_is_not_the_one_named_is_noticed(
    verdict_before: Verdict, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_before("C5") == HOLDS
    monkeypatch.setenv("GRAD_SAMPLE_MODE", "ghost")
    changed = measured("C5")
    assert changed.verdict == REFUTED
    assert "16 have every bit of the norms as defined, 4 ran the mode" in changed.measured


def test_what_only_a_gpu_can_tell_says_so(as_it_is: Measure) -> None:
    assert (as_it_is("E2").verdict == NEEDS_GPU) is not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("slower", "verdict"),
    [
        pytest.param((512, 1024, 2048, 4096), HOLDS, marks=pytest.mark.nightly),
        pytest.param((), REFUTED, marks=pytest.mark.nightly),
        pytest.param((2048, 4096), "holds only if T is one of 2048, 4096", marks=pytest.mark.nightly),
    ],
)
def test_times_on_a_gpu_turn_the_verdict(
    slower: tuple[int, ...], verdict: str, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the clock and the device, which only a GPU has."""

    def milliseconds(run: Any) -> float:
        return 2.0 if run.func is not section_e._cublas and run.args[0].shape[1] in slower else 1.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "made up")
    monkeypatch.setattr(section_e, "_DEVICE", "cpu")
    monkeypatch.setattr(section_e, "_WIDTH", 16)
    monkeypatch.setattr(section_e, "_milliseconds", milliseconds)
    monkeypatch.setattr(section_e, "_peak", lambda run: 1)
    if not slower:
        monkeypatch.setattr(section_e, "_milliseconds", lambda run: 2.0 if run.func is section_e._cublas else 1.0)
    assert measured("E2").verdict == verdict
    monkeypatch.setattr(section_e, "_cublas", lambda a, g: torch.ones(len(a)))
    with pytest.raises(RuntimeError, match="cuBLAS have other norms at T = 512"):
        measured("E2")


@pytest.mark.nightly
def test_the_launch_example_is_what_fails(
    verdict_before: Verdict, measured: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verdict_before("D15").startswith("holds only if the process group is made before")
    monkeypatch.setattr(section_d_steps, "_PRINTED", section_d_steps._REPAIRED)
    assert measured("D15").verdict == HOLDS


def test_every_row_is_turned_by_something_above() -> None:
    turned = {id for id, _ in FAULTS} | {change.id for change in CHANGES + CHANGES_OF_FSDP2}
    by_themselves = {"A7", "A8", "C5", "D15"}
    for_a_gpu = {"E2"}
    assert turned | by_themselves | for_a_gpu == {row.id for row in registry.all_claims()}
