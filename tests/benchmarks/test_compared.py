"""Compared scripts: each planted bug fits its script, and by night each runs to its end on simulated ranks."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.compared.honest", reason="only a checkout has the benchmarks")
from benchmarks.compared import effects, study
from benchmarks.compared.bugs import BUGS
from benchmarks.compared.honest import BY_NAME, HONEST, SCRIPTS, Honest
from benchmarks.compared.planted import CAUSES, Bug
from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.compare import compare
from fsdpcheck.simulation.simulate import Options

REFUSES_FLOAT64 = ("fsdp1_orig_params", "fsdp1_flat")
"""Scripts that clip by FSDP1, whose ``clip_grad_norm_`` takes norms in float32 alone."""


def _name(row: Honest | Bug) -> str:
    return row.name


def test_every_script_is_in_the_table_once() -> None:
    names = [script.name for script in HONEST]
    assert sorted(names) == sorted(path.stem for path in SCRIPTS.glob("*.py"))
    assert {bug.script for bug in BUGS} <= set(names)


@pytest.mark.parametrize("script", HONEST, ids=_name)
def test_arguments_follow_the_number_of_ranks(script: Honest) -> None:
    for ranks in script.ranks:
        words = " ".join(script.arguments(ranks))
        assert "{" not in words
    assert script.ranks == tuple(sorted(set(script.ranks)))


def test_every_bug_fits_its_script_and_is_python() -> None:
    assert not [name for name, times in Counter(bug.name for bug in BUGS).items() if times > 1]
    texts = {}
    for bug in BUGS:
        texts[bug.name] = ast.dump(ast.parse(bug.text()))
        assert texts[bug.name] != ast.dump(ast.parse(bug.honest.path.read_text(encoding="utf-8"))), bug.name
    assert len(set(texts.values())) == len(texts), "two bugs are the same text"


def test_an_edit_that_does_not_fit_once_is_refused() -> None:
    for old, times in (("no such line", 0), ("import", 6)):
        bug = Bug("made", "ddp_mlp", "other", "loss", "", ((old, ""),))
        with pytest.raises(ValueError, match=f"occurs {times} times in ddp_mlp, wanted once"):
            bug.text()


def test_every_bug_says_what_is_expected() -> None:
    for bug in BUGS:
        assert bug.cause in CAUSES, bug.name
        assert bug.truth, bug.name
        assert set(bug.ranks) <= set(bug.honest.ranks[1:]), bug.name
        assert (bug.first == "") == (bug.ranks == ()) == bug.harmless, bug.name
        assert (bug.size is not None) == (bug.cause == "small error"), bug.name


@pytest.mark.nightly
@pytest.mark.parametrize("script", [script for script in HONEST if script.name not in REFUSES_FLOAT64], ids=_name)
def test_an_honest_script_prints_the_same_in_float64_on_any_number_of_ranks(script: Honest) -> None:
    """Eight digits of numbers of sixteen: rounding is not seen, and a part of a batch that is lost is."""
    text = effects.in_float64(script.path.read_text(encoding="utf-8"))
    printed = {}
    for ranks in script.ranks:
        seen = effects.run(text, script.name, script.arguments(ranks, quiet=True), ranks)
        assert seen.failure == "", (ranks, seen.failure)
        printed[ranks] = seen.losses()
    first = printed[script.ranks[0]]
    assert len(first) > 5
    assert printed == dict.fromkeys(script.ranks, first)


@pytest.mark.nightly
@pytest.mark.parametrize("name", REFUSES_FLOAT64)
def test_a_script_whose_library_refuses_float64_is_compared_all_the_same(name: str) -> None:
    script = BY_NAME[name]
    found = compare(read(f"{script.path} {script.line}"), script.ranks, Options(show=False))
    assert [world.says for world in found.worlds] == ["agrees"] * 3, found


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=_name)
def test_a_bug_runs_to_its_end_or_fails_as_it_says(bug: Bug) -> None:
    for ranks in bug.ranks[:1]:
        seen = effects.run(bug.text(), bug.script, bug.honest.arguments(ranks, quiet=True), ranks)
        assert seen.failure == "", (ranks, seen.failure)
        assert seen.parameters


def test_the_document_has_the_tables_of_the_record() -> None:
    document = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    assert "\n".join(study.lines(tables=True)) in document, "next: python -m benchmarks compared --tables"


def test_the_record_has_each_script_once() -> None:
    """The table's first line names the commits of its rows."""
    rows = [json.loads(line) for line in study.RECORD.read_text(encoding="utf-8").splitlines()]
    assert sorted(row["name"] for row in rows) == sorted(item.name for item in study.items())
