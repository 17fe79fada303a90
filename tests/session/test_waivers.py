"""Waivers: which findings one covers, and when it is red by itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from fsdpcheck.case import LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.errors import UsageError
from fsdpcheck.findings.roots import words
from fsdpcheck.findings.tokens import Token, encode
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.session.waivers import Waived, Waiver, applied, read

TODAY = date(2026, 11, 28)
TOKEN = encode(Token("training.plain", "ddp", TrainingCase(ModelSpec((LayerSpec(1),)))))
ROOT = "value: wrong"
WAIVER = Waiver("training.*", "ddp", "known", "me", date(2026, 11, 28), TOKEN, ROOT)
TEXTS = ("guarantee", "engine", "got", "wanted", "where", "words")
FINDING = Finding(
    **dict.fromkeys(TEXTS, "x"), law="training.plain", adapter="ddp", what="wrong", kind="value", place="",  # type: ignore[arg-type]
    cause="", case={}, token=TOKEN,
)  # fmt: skip
BROKEN = Verdict("training.plain", "ddp", "finding", 1, finding=FINDING, exit_code=1)


def of(*findings: Finding, waiver: Waiver = WAIVER, verdict: Verdict = BROKEN) -> Waived:
    return applied([waiver], findings, lambda waiver: verdict, TODAY)


def test_a_waiver_covers_the_findings_of_its_root_in_its_laws() -> None:
    of_other_law = replace(FINDING, law="training.gradients")
    others = (replace(FINDING, law="state.resumed"), replace(FINDING, adapter="fsdp1"), replace(FINDING, what="other"))
    found = of(FINDING, of_other_law, *others)
    assert (found.findings, found.wrong) == (((FINDING, WAIVER), (of_other_law, WAIVER)), ())


def test_the_witness_itself_is_covered_where_no_cause_is_named_of_it() -> None:
    named, waiver = replace(BROKEN, finding=replace(FINDING, cause="padding")), replace(WAIVER, root="value: padding")
    assert of(FINDING, verdict=named, waiver=waiver).findings == ((FINDING, waiver),)
    elsewhere, otherwise = replace(FINDING, token="v2:x"), replace(FINDING, cause="clipping")
    for other in (elsewhere, otherwise, replace(FINDING, what="other"), replace(FINDING, kind="raised")):
        assert of(other, verdict=named, waiver=waiver).findings == ()


@pytest.mark.parametrize(
    "shown",
    [
        {"kind": "raised", "got": "rank 0 raised RuntimeError: boom"},
        {"kind": "mismatch", "got": "mismatch: call #1 on ranks [0, 1]\n  rank 0: in all_reduce"},
        {"cause": "the gradient is clipped twice"},
        {"what": "another value is wrong"},
        {"case": {"arithmetic": {"numbers": "grid"}}, "got": "2.0", "wanted": "1.0"},
    ],
)
def test_a_witness_that_fails_by_another_mistake_covers_nothing(shown: dict[str, str]) -> None:
    other = replace(FINDING, **shown)
    found = of(other, verdict=replace(BROKEN, finding=other))
    assert (found.findings, len(found.wrong)) == ((), 1)
    assert found.wrong[0].startswith("the witness of a waiver fails otherwise now: ")
    assert found.wrong[0].endswith(f'write root = "{words(other)}"')
    waiver = replace(WAIVER, root=words(other))
    assert of(other, verdict=replace(BROKEN, finding=other), waiver=waiver).findings == ((other, waiver),)


def test_a_waiver_without_a_root_is_red_and_says_what_to_write() -> None:
    found = of(FINDING, waiver=replace(WAIVER, root=""))
    assert found.findings == ()
    assert found.wrong[0].startswith("the witness of a waiver is not said to fail in any way: ")
    assert found.wrong[0].endswith(f'; if that is the defect, write root = "{ROOT}"')


def test_how_a_finding_fails_is_the_same_for_other_numbers_of_a_cause_and_not_for_other_exact_values() -> None:
    two, three = (replace(FINDING, cause=f"exactly 1/W = {1 / many} times") for many in (2, 4))
    assert words(two) == words(three) == "value: exactly #/W = # times"
    exact = replace(FINDING, case={"arithmetic": {"numbers": "grid"}})
    assert words(replace(exact, got="1.0")) == "value: wrong: got 1.0, wanted x"


def test_a_waiver_counts_up_to_its_last_day_and_is_never_replayed_afterwards() -> None:
    found = applied([replace(WAIVER, expires=date(2026, 11, 27))], [FINDING], lambda waiver: 1 / 0, TODAY)  # type: ignore[arg-type, return-value]
    assert found.findings == ()
    assert found.wrong == ("a waiver has expired: training.* on ddp, until 2026-11-27: known (me)",)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict("training.plain", "ddp", "holds", 1), "holds now: take the waiver away"),
        (Verdict("training.plain", "ddp", "error", 1, exit_code=3), "is error now"),
    ],
)
def test_a_witness_that_breaks_no_more_is_red(verdict: Verdict, said: str) -> None:
    found = of(FINDING, verdict=verdict)
    assert (found.findings, len(found.wrong)) == ((), 1)
    assert found.wrong[0].startswith(f"the witness of a waiver {said}: ")


def test_a_defect_that_no_case_of_a_session_meets_stays_waived_and_is_said() -> None:
    """Its witness breaks still: which cases are drawn makes no gate red."""
    elsewhere = [replace(FINDING, law="clipping.norms"), replace(FINDING, adapter="fsdp1")]
    assert applied([WAIVER], elsewhere, lambda waiver: BROKEN, TODAY) == Waived((), (), (WAIVER,))
    assert of(FINDING).unmet == ()


def test_a_waiver_that_covers_nothing_is_red() -> None:
    assert of(replace(FINDING, what="other")).wrong[0].startswith("a waiver covers no finding of this session: ")


ENTRY = f'''[[tool.fsdpcheck.waiver]]
law = "training.*"
adapter = "ddp"
reason = "known"
owner = "me"
expires = 2026-11-28
token = "{TOKEN}"
'''


def test_waivers_are_read_from_the_project_s_file(tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    assert read(file) == ()
    file.write_text("[project]\n")
    assert read(file) == ()
    file.write_text(ENTRY + f'root = "{ROOT}"\n' + ENTRY)
    assert read(file) == (WAIVER, replace(WAIVER, root=""))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('owner = "me"\n', "", "no owner"),
        ('owner = "me"', "owner = 3", "owner is int"),
        ("2026-11-28", '"2026-11-28"', "expires is str"),
        ('owner = "me"', 'owner = "me"\nuntil = 3', "unknown: until"),
        (TOKEN, "v2:nonsense", "a waiver has no token"),
        ('"ddp"', '"fsdp1"', "a waiver has the token of another finding"),
        ('"training.*"', '"state.*"', "a token of training.plain on ddp"),
    ],
)
def test_a_waiver_that_is_not_complete_is_told(old: str, new: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(ENTRY.replace(old, new))
    with pytest.raises(UsageError, match=r"where   .*pyproject.toml, waiver 1") as raised:
        read(file)
    assert said in str(raised.value)
