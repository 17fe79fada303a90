"""Rows of the ledger: each verdict becomes another when the thing it speaks of is broken, or its numbers change."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpcheck.claims import judging, registry, section_a, section_d_steps
from fsdpcheck.claims.lab import Lab, impl
from fsdpcheck.claims.registry import HOLDS, NEEDS_GPU, REFUTED, Outcome

LEDGER = (
    [f"A{n}" for n in range(1, 13)]
    + ["B1", "B2", "B3", "B4", "B4'", "B5", "B6", "B7", "B8", "B9"]
    + [f"C{n}" for n in range(1, 7)]
    + [f"D{n}" for n in range(1, 16)]
    + ["E1", "E2", "E3"]
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "claims.md"
checkout = pytest.mark.skipif(not DOCUMENT.is_file(), reason="needs the files of the checkout")


def _is_row(line: str) -> bool:
    return line.startswith("| ") and not line.startswith("| id")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()


def measured(lab: Lab, id: str) -> Outcome:
    (row,) = registry.chosen([id])
    return row.check(lab)


def test_every_row_of_the_ledger_has_a_check() -> None:
    assert [row.id for row in registry.all_claims()] == LEDGER


@pytest.mark.parametrize(
    ("id", "fault"),
    [
        ("A1", "partial_norms_not_summed"),
        ("A1", "owned_part_off_by_one"),
        ("A2", "partial_norms_not_summed"),
        ("A3", "gathered_norms_left_in_rank_order"),
        ("A6", "sample_dropped_in_second_pass"),
        ("B2", "averaged_twice"),
        ("B4'", "padding_read_by_global_norm"),
        ("B5", "averaged_twice"),
        ("B5", "summed_not_averaged"),
        ("B8", "summed_not_averaged"),
        ("C2", "deferred_norms_are_stale"),
        ("C6", "empty_rank_skips_its_collectives"),
    ],
)
def test_a_planted_fault_refutes_the_claim(lab: Lab, id: str, fault: str) -> None:
    assert measured(lab, id).verdict.startswith(HOLDS)
    with impl("faults").install(fault) as planted:
        assert measured(lab, id).verdict == REFUTED
    assert planted.hits > 0


def _halves_the_padding(original: Any) -> Any:
    def pack(self: Any, pieces: Any) -> torch.Tensor:
        packed: torch.Tensor = original(self, pieces)
        packed[self.numel :] = 0.5
        return packed

    return pack


_PEAKS = {"immediate": 100, "deferred": 110}

CHANGES: dict[str, tuple[str, str, str, Any]] = {
    # row: (verdict then, the module that is changed, the attribute, original -> changed)
    "A4": (REFUTED, "fsdpcheck.impl.layout", "_fingerprint", lambda original: lambda inputs: 7),
    "A5": (HOLDS, "fsdpcheck.claims.section_a", "CLIP_NORM", lambda original: 2.0**60),
    "A9": (REFUTED, "fsdpcheck.claims.network", "ALPHA_SECONDS", lambda original: 4e-3),
    "A10": (REFUTED, "fsdpcheck.claims.section_a_cost", "_sent", lambda original: lambda squared, dtype: squared * 2),
    "B3": (REFUTED, "fsdpcheck.impl.flat:FlatBuffer", "real", lambda original: property(lambda self: self.shard_numel)),
    "B4": (REFUTED, "fsdpcheck.impl.flat:FlatBuffer", "pack", _halves_the_padding),
    "B6": (REFUTED, "fsdpcheck.claims.section_b_memory", "_wide", lambda original: lambda hidden: original(5)),
    "B7": (REFUTED, "fsdpcheck.impl.flat:FlatBuffer", "free", lambda original: lambda self: None),
    "C1": (REFUTED, "fsdpcheck.claims.section_c", "_UNEVEN", lambda original: [[0], [1], [2]]),
    "C3": (HOLDS, "fsdpcheck.claims.section_c", "_bound", lambda original: lambda *sizes: 1.6),
    "C4": (REFUTED, "fsdpcheck.claims.section_c", "_peak", lambda original: lambda lab, mode, timing: _PEAKS[timing]),
    "D2": (REFUTED, "fsdpcheck.claims.section_d", "_frozen", lambda original: lambda frozen: original(False)),
    "D10": (
        REFUTED,
        "torch.distributed.fsdp:FSDPModule",
        "set_requires_gradient_sync",
        lambda original: lambda self, sync, **more: None,
    ),
    "D12": (
        REFUTED,
        "fsdpcheck.claims.section_d_steps",
        "sharded",
        lambda original: lambda module, **more: original(module),
    ),
    "D14": (HOLDS, "torch.nn.init", "normal_", lambda original: torch.nn.init.zeros_),
    "E1": (REFUTED, "fsdpcheck.impl.norms.linear", "gram", lambda original: lambda a, g: original(a, g) + 1),
    "E3": (
        HOLDS,
        "fsdpcheck.impl.norms.linear",
        "gram",
        lambda original: lambda a, g: impl("norms.linear").direct(a.double(), g.double()).float(),
    ),
}


@pytest.mark.parametrize("id", CHANGES)
def test_a_change_changes_the_verdict(lab: Lab, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, place, attribute, change = CHANGES[id]
    before = measured(lab, id).verdict
    module, _, name = place.partition(":")
    owner = importlib.import_module(module)
    owner = getattr(owner, name) if name else owner
    monkeypatch.setattr(owner, attribute, change(vars(owner)[attribute]))
    assert before != wanted
    assert measured(lab, id).verdict == wanted


def test_the_worked_example_with_right_numbers(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {0: ([[3.0] * 6, [1.0] * 6, [0.0] * 6], [54.0, 6.0, 0.0]), 1: ([[1.0] * 6] * 3, [6.0, 6.0, 6.0])}
    assert measured(lab, "A7").verdict == REFUTED
    monkeypatch.setattr(section_a, "_ROWS", rows)
    monkeypatch.setattr(section_a, "_TOTALS", [60.0, 12.0, 6.0])
    assert measured(lab, "A7").verdict == HOLDS


def test_one_call_for_norms_is_counted(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    aggregate = impl("aggregate")
    once = aggregate.sum_over
    monkeypatch.setattr(aggregate, "sum_over", lambda partial, axis: once(once(partial, axis) / axis.size, axis))
    assert measured(lab, "A8").verdict == REFUTED


def test_a_mode_that_is_not_the_one_named_is_noticed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(lab, "C5").verdict == HOLDS
    monkeypatch.setenv("GRAD_SAMPLE_MODE", "ghost")
    changed = measured(lab, "C5")
    assert changed.verdict == REFUTED
    assert "16 have every bit of the norms as defined, 4 ran the mode" in changed.measured


def test_what_only_a_gpu_can_tell_says_so(lab: Lab) -> None:
    assert measured(lab, "E2").verdict == NEEDS_GPU


@checkout
def test_the_document_has_every_row() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if _is_row(line)]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines] == LEDGER


@checkout
@pytest.mark.nightly
def test_the_document_is_what_the_ledger_measures_twice_alike() -> None:
    rows = [row for row in registry.all_claims() if row.id != "D15"]  # starts processes: below
    once, twice = judging.judge(rows), judging.judge(rows)
    assert once == twice
    written = DOCUMENT.read_text()
    assert [row.id for row in once if f"| {row.statement} | *{row.verdict}* |" not in written] == []


@pytest.mark.nightly
def test_the_launch_example_is_what_fails(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(lab, "D15").verdict.startswith("holds only if the process group is made before")
    monkeypatch.setattr(section_d_steps, "_PRINTED", section_d_steps._REPAIRED)
    assert measured(lab, "D15").verdict == HOLDS
