"""Which branches no law reaches: refusals, those with a reason, and those that are left; and the record of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

branches = pytest.importorskip("benchmarks.branches", reason="only a checkout has the benchmarks")
from benchmarks.branches import reasons, record, rows, union  # noqa: E402
from benchmarks.branches.reasons import Reason, sorted_out  # noqa: E402
from benchmarks.branches.union import Branch  # noqa: E402

ROOT = Path(__file__).parents[2]
SOURCE = '''
def checked(x):
    """A check."""
    if x < 0:
        why = "negative"
        raise ValueError(why)
    for one in range(x):
        if one == 3:
            return one
    raise AssertionError
'''


def test_blocks_that_raise_are_refusals_and_no_others() -> None:
    assert union._refusing(ast.parse(SOURCE)) == {5, 6, 10}


def test_a_branch_is_known_by_its_text_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(union, "ROOT", tmp_path)
    found = []
    for name, above in (("one.py", ""), ("other.py", "\n# a comment more\n")):
        (tmp_path / name).write_text(above + SOURCE)
        lines = above.count("\n")
        found.append([union._of_file(tmp_path / name)("checked", 8 + lines, end) for end in (9 + lines, 7 + lines)])
    for one, other in zip(*found, strict=True):
        assert str(one).removeprefix("one.py") == str(other).removeprefix("other.py")
    assert str(found[0][0]) == "one.py::checked: if one == 3: -> return one"
    assert not found[0][0].refuses
    assert union._of_file(tmp_path / "one.py")("checked", 4, 5).refuses


TAKEN, OTHER, THIRD = (Branch("a.py", "f", f"if {x}:", "exit") for x in "xyz")
RAISES = Branch("a.py", "f", "if w:", "raise ValueError", refuses=True)


def test_a_reason_is_of_so_many_branches_as_it_says() -> None:
    every = {TAKEN, OTHER, THIRD, RAISES}
    right = sorted_out(every, {TAKEN}, [Reason("a.py::f", 2, "an option")])
    assert (right.taken, right.refusals, right.reasoned) == ({TAKEN}, {RAISES}, {OTHER, THIRD})
    assert (right.left, right.stale) == (frozenset(), ())
    for number in (1, 3):
        wrong = sorted_out(every, {TAKEN}, [Reason("a.py::f", number, "an option")])
        assert wrong.left == {OTHER, THIRD}
        assert wrong.stale == (f"a.py::f: of {number} branches, 2 are not taken",)
    assert sorted_out(every, every, [Reason("a.py::f", 1, "an option")]).stale, "a law takes it by now"


def test_what_a_session_was_the_first_to_reach_must_be_reached_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ROWS", (rows.Row("one", "reference", ("training.*",)),))
    monkeypatch.setattr(branches, "run", lambda row, data: "")
    monkeypatch.setattr(record, "read", lambda: {"first": {"one": [str(TAKEN), str(OTHER)]}})
    monkeypatch.setattr(branches, "taken", lambda file: {TAKEN, OTHER, THIRD})
    assert list(branches.now()) == ["one: 2 of 2 are reached"]
    monkeypatch.setattr(branches, "taken", lambda file: {TAKEN})
    told = []
    with pytest.raises(SystemExit) as end:
        told += branches.now()
    assert end.value.code == 1


def test_reasons_name_functions_and_tests_that_are_there() -> None:
    for one in reasons.read():
        file, _, function = one.where.partition("::")
        tree = ast.parse((union.ROOT / file).read_text(encoding="utf-8"))
        named = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert function.rpartition(".")[2] in named, one.where
        assert one.why, one.where
        assert not one.tests or (ROOT / one.tests).is_file(), one.tests


def test_the_record_is_of_today_s_sessions_and_document() -> None:
    held = record.read()
    assert list(held["first"]) == [row.name for row in rows.ROWS]
    assert sum(map(len, held["first"].values())) == held["taken"]
    assert held["left"] == 0, "a branch that no law takes has a reason"
    assert " ".join(record.told(held)) in " ".join((ROOT / "docs" / "results.md").read_text(encoding="utf-8").split())
