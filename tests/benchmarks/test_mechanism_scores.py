"""What is read off a finding of a mechanism, beside what was written down of that beforehand."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks.mechanism_scores", reason="only a checkout has the benchmarks")
from benchmarks import mechanism_scores, mechanisms
from benchmarks.kept import Kept
from benchmarks.mechanism_scores import FAILED, NAMED, ORDER, PRINTED, cause, printed_lines, quantity, score, window
from benchmarks.mechanisms import NOW
from fsdpcheck.judging import points
from tests.mechanisms.planted import ALL
from tests.mechanisms.planting import Mechanism

NAME = "replicas_of_single_shards"
"""Expected: the reduced gradient, in FlatUnit.reduce_gradients."""
ALTERED = ALL[NAME].changes[0]


def row(name: str = NAME, **fields: str) -> dict[str, Any]:
    empty = dict.fromkeys(("place", "stage", "lines", "cause", "got"), "")
    finding = {"law": "training.plain", "kind": "value", "what": "the gradient is not the single device's"}
    return {"mechanism": name, "profile": "quick", "finding": {**finding, **empty, **fields}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "absent"),
        ({"stage": "right, as far as they are compared bit for bit: the norms"}, "absent"),
        ({"stage": "the first to differ, in step 3: the reduced gradient of w on rank 0: is missing"}, "right"),
        ({"stage": "the first to differ, in step 0 (with ignored in use): the reduced gradient of w"}, "right"),
        ({"stage": "the first to differ, in step 0: the norms on rank 1: [0] is 3, wanted 4"}, "another"),
        ({"kind": "raised"}, "another"),
    ],
)
def test_the_first_wrong_quantity_that_is_printed(fields: dict[str, str], said: str) -> None:
    assert quantity(row(**fields)) == said


def test_how_a_run_failed_is_the_first_wrong_quantity() -> None:
    assert quantity(row("bias_taken_for_granted", kind="raised")) == "right"
    assert quantity(row("backward_skipped_without_samples", kind="mismatch")) == "right"
    assert quantity(row("backward_skipped_without_samples", kind="raised")) == "another"


def test_a_window_is_inside_if_a_printed_line_is_of_an_altered_function() -> None:
    source, first = inspect.getsourcelines(ALTERED.target)
    last = first + len(source) - 1
    assert window(row()) == "absent"
    assert (
        window(row(place=f"{ALTERED.file}:{first}")) == window(row(lines=f"{ALTERED.file}:{last} in f: x")) == "inside"
    )
    assert window(row(stage=f"wrong at {ALTERED.file}:{last + 1} in g: x = 1")) == "outside"
    assert window(row(place=f"impl/another.py:{first}")) == "outside"
    assert window(row(lines=f"{ALTERED.file}:1, {first - 2}-{first} in f: x")) == "inside", "a range ends in it"


def test_frames_of_a_traceback_are_no_window() -> None:
    assert printed_lines(row(kind="raised", got=f'File "{ALTERED.file}:{ALTERED.lines[0]}"', place="a.py:3")) == [
        ("a.py", 3)
    ]


@pytest.mark.parametrize(
    ("said", "is_"),
    [
        ("", "absent"),
        ("only the samples of replica 0 count: gradients are not reduced over the replicas", "right"),
        ("the samples are in another order: the sampler's epoch does not reach the shuffle", "WRONG"),
        ("clipped by factors from wrong norms: the norm is a norm of replicas' norms", "right"),
        ("the optimizer's state of the replicas did not come back as it was saved", "right"),
    ],
)
def test_a_cause_contradicts_where_all_that_it_names_comes_before_or_has_no_word_in_common(said: str, is_: str) -> None:
    """Of what is named later in a step a cause may be a consequence, as in the last two: it is not counted as wrong."""
    assert cause(row(cause=said)) == is_


def test_a_cause_of_quantities_that_come_before_is_wrong() -> None:
    """Of a wrong optimizer state: what it names, the gradients, is right by then."""
    said = "the gradient of the step is 2 times the right one, as of the learning rate"
    assert cause(row("learning_rate_not_loaded", cause="the gradient is 2 times the one of the step")) == "WRONG"
    assert cause(row("learning_rate_not_loaded", cause=said)) == "right", "it names what is expected as well"


def test_a_cause_that_names_nothing_is_of_what_was_found_wrong() -> None:
    found = {
        "cause": "it is exactly 1/sqrt(W) = 0.707107 times the right one",
        "what": "the global gradient norm is wrong",
    }
    assert cause(row("norms_of_ranks_averaged", **found)) == "right"


def test_shares_are_told_beside_the_goals() -> None:
    survived = {"mechanism": "last_use_only", "profile": "ci", "finding": None}
    told = "\n".join(score([row(place=f"{ALTERED.file}:{ALTERED.lines[0]}"), row("tail_never_drawn"), survived]))
    assert "3 mechanisms: 2 of 3 = 67 % found (goal >= 95 %), 2 of them in quick" in told
    assert "survived: last_use_only" in told
    assert "window or cause right: 1 of 2 = 50 % (goal >= 85 %)" in told
    assert "causes that are wrong: 0 (goal 0)" in told
    assert told.endswith("neither: tail_never_drawn")


def test_the_newest_row_of_a_mechanism_counts() -> None:
    older, newer = row(), {**row(), "profile": "ci", "finding": None}
    assert next(iter(score([older, newer]))).startswith("1 mechanisms: 0 of 1")


def test_every_printed_quantity_has_its_place_among_the_expected() -> None:
    assert {*points.WORDS.values()} <= {*PRINTED}
    assert {one for found in PRINTED.values() for one in found} | {*FAILED.values()} | {*NAMED} <= {*ORDER}


def test_the_record_can_be_scored() -> None:
    rows = Kept(str(NOW), "mechanism", "profile").rows
    told = [*score(rows)]
    assert told[0].startswith(f"{len({one['mechanism'] for one in rows})} mechanisms: ")
    assert not any("?" in mechanism_scores.printed_quantities(one) for one in rows if one["finding"])


def test_what_some_laws_alone_do_not_find_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others might find it. In ``quick`` nothing is found here, in ``ci`` by the law that was asked."""
    asked: list[tuple[str, str]] = []

    def judged(engine: object, mechanism: Mechanism, profile: str, laws: str) -> dict[str, Any]:
        asked.append((profile, laws))
        finding = dict.fromkeys(mechanisms._QUOTED, "") if (profile, laws) == ("ci", "clipping.norms") else None
        return {"profile": profile, "laws": 1, "cases": 2, "seconds": 3, "beside": [], "finding": finding}

    monkeypatch.setattr(mechanisms, "_judged", judged)
    name, record = "odd_padding_before", tmp_path / "rows.jsonl"
    told = list(mechanisms.lines(str(record), name, "clipping.sum"))
    assert [line.partition(",")[2] for line in told[:2]] == [" asked clipping.sum alone: not kept"] * 2
    assert told[2:] == ["0 mechanisms on record"]
    assert not record.exists()
    assert "1 mechanisms: 1 of 1 = 100 % found" in "\n".join(mechanisms.lines(str(record), name, "clipping.norms"))
    (row,) = map(json.loads, record.read_text().splitlines())
    assert (row["profile"], row["asked"]) == ("ci", "clipping.norms")
    assert asked == [
        ("quick", "clipping.sum"),
        ("ci", "clipping.sum"),
        ("quick", "clipping.norms"),
        ("ci", "clipping.norms"),
    ]
