"""Findings before and after: which faults they are about follows from the rule, and the document has them all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

before_and_after = pytest.importorskip("benchmarks.before_and_after", reason="only a checkout has the benchmarks")
from benchmarks.before_and_after import EARLIER, HERE, TEN, Planted, Printed, command, without  # noqa: E402
from fsdpcheck.impl import faults  # noqa: E402

PAGE = HERE / "docs" / "findings-before-and-after.md"


def test_the_ten_follow_from_the_rule() -> None:
    """Faults that came after the earlier commit stand behind those of the ten, so that this one gives the same list."""
    laws: list[str] = []
    for planted in TEN:
        module = f"{faults.__name__}.{planted.module}"
        of_it = [one for one in faults.ALL.values() if (one.plant.__module__, one.subject) == (module, "reference")]
        fits = {one.name: one.caught_by for one in of_it if "*" not in one.caught_by and one.caught_by not in laws}
        assert (planted.fault, planted.law) == min(fits.items())
        laws.append(planted.law)
    assert len(set(laws)) == len({planted.module for planted in TEN}) == 10


def test_a_report_is_shown_without_the_folder_of_its_checkout() -> None:
    assert (
        without(Path("/some/where"), "\nFINDING 1  \n  at /some/where/impl/a.py:1\n\n") == "FINDING 1\n  at impl/a.py:1"
    )


def test_what_is_no_checkout_of_the_earlier_commit_is_refused() -> None:
    with pytest.raises(RuntimeError, match=EARLIER):
        before_and_after.checkout_of(sys.executable)


def test_sixty_cases_are_judged_where_ten_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def session(planted: Planted, python: str, checkout: Path, profile: str) -> Printed:
        return Printed(int((python, profile) != (sys.executable, "quick")), f"{checkout.name} {profile}")

    monkeypatch.setattr(before_and_after, "session", session)
    monkeypatch.setattr(before_and_after, "checkout_of", lambda python: Path("/earlier"))
    heading, asked, *sides = before_and_after.lines("python-of-then", TEN[0].fault)
    assert heading.startswith("## 1. Which samples are drawn: `batches_of_one_size`")
    assert f"fsdpcheck {' '.join(command(TEN[0]))}" in asked
    assert [re.findall(r"^(.*):\n\n```text\n\S+ (\w+)\n```", side) for side in sides] == [
        [("Before", "quick")],
        [("After", "quick")],
        [("After, with `--profile ci`", "ci")],
    ]


@pytest.mark.skipif(not PAGE.is_file(), reason="only a checkout has the documents")
def test_the_document_has_what_both_commits_print_of_each() -> None:
    text = PAGE.read_text(encoding="utf-8")
    sections = re.split(r"^## \d+\. ", text, flags=re.MULTILINE)[1:]
    for planted, section in zip(TEN, sections, strict=True):
        assert section.partition("\n")[0].endswith(f": `{planted.fault}`")
        assert f"```text\nfsdpcheck {' '.join(command(planted))}\n```" in section
        assert re.findall(r"^(Before|After):$", section, re.MULTILINE) == ["Before", "After"]
