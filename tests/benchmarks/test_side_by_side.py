"""Faults in Opacus and fully_shard: each alters one place, and the document has the table of the record."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.side_by_side", reason="only a checkout has the benchmarks")
from benchmarks.kept import Kept
from benchmarks.side_by_side import faults, plugin, table
from benchmarks.side_by_side.changes import probed
from benchmarks.side_by_side.study import RECORD
from tests.mechanisms.planting import Mechanism

OPACUS, FULLY_SHARD = (list(side.mechanisms.values()) for side in faults.SIDES)


def _alters_one_place(fault: Mechanism) -> None:
    (change,) = fault.changes
    before = change.target.__code__
    begin, end = change.lines
    assert begin <= before.co_firstlineno - 1 + change.line <= end
    with fault() as hits:
        assert change.target.__code__ != before
        assert hits.hits == 0
    assert change.target.__code__ is before


@pytest.mark.parametrize("fault", FULLY_SHARD, ids=lambda fault: fault.name)
def test_a_fault_of_fully_shard_alters_one_place(fault: Mechanism) -> None:
    _alters_one_place(fault)


@pytest.mark.parametrize("fault", OPACUS, ids=lambda fault: fault.name)
def test_a_fault_of_opacus_alters_one_place(fault: Mechanism) -> None:
    pytest.importorskip("opacus")
    _alters_one_place(fault)


def test_probes_of_one_function_say_which_line_ran_and_change_nothing() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import _get_dim0_padded_size as padded

    fault, ran = faults.ALL["padded_size_rounded_down"], list[str]()
    size: Callable[..., Any] = padded
    sound = size((3, 2), 2)
    with probed([fault, faults.ALL["reduced_in_the_compute_dtype"]], ran.append):
        assert size((3, 2), 2) == sound
    assert ran == [fault.name]
    assert size((3, 2), 2) == sound
    assert ran == [fault.name], "probes stay behind"


def test_a_test_that_does_not_pass_executes_nothing_that_counts() -> None:
    rows: list[dict[str, Any]] = [
        {"test": "a", "hit": "f"}, {"test": "a", "outcome": "passed", "seconds": 1.0, "why": ""},
        {"test": "b", "hit": "f"}, {"test": "b", "outcome": "failed", "seconds": 1.0, "why": "no"},
        {"test": "c", "outcome": "skipped", "seconds": 0.0, "why": "Skipped: no GPU"},
    ]  # fmt: skip
    summed = plugin.summed(rows)
    assert (summed["passed"], summed["failed"], summed["skipped"]) == (["a"], {"b": "no"}, {"no GPU": ["c"]})
    assert summed["executed"] == {"f": [0]}


def test_there_are_forty_faults_each_with_what_it_stands_for() -> None:
    assert len(faults.ALL) >= 40
    for fault in faults.ALL.values():
        assert re.search(r"^planted: |^mechanism: |^[\w.-]+/[\w.-]+#\d+", fault.source), fault.name


def test_the_document_has_the_table_of_the_record() -> None:
    document = (Path(__file__).parents[2] / "docs" / "side-by-side.md").read_text(encoding="utf-8")
    rows = Kept(str(RECORD), "fault", "arm").rows
    assert "\n".join(table.table(rows)) in document, "next: python -m benchmarks side-by-side prints it"


def test_the_record_is_of_known_faults_and_names_no_folder_of_a_machine() -> None:
    rows = Kept(str(RECORD), "fault", "arm").rows
    assert {row["fault"] for row in rows} <= {*faults.ALL, plugin.NO_FAULT}
    assert {row["arm"] for row in rows if row["fault"] in faults.ALL} <= set(table.ARMS)
    assert not re.search(r"(?<![\w.])/(?:tmp|home|root|work|usr)/", RECORD.read_text(encoding="utf-8"))
