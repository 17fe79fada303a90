"""What every law says of itself: a guarantee, what it cannot see, where the bug that it catches happened for real."""

from __future__ import annotations

import re

import pytest

from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters

REPORT = re.compile(r"[\w./-]*\w#\d+")
"""A public report: the repository, with its owner where the name alone is not known, and the number of the thread."""
NO_REPORT = "no public report known"
WHOLE = """Norms are norms.

Of every sample.
Not seen: what is linear and wrong; norms of what
nobody trains.
Source: claim A1; Opacus#751.
"""


def lacking(statement: str) -> list[str]:
    """What a statement lacks of: one sentence, then at last paragraphs "Not seen: ..." and "Source: ..." in this order.

    A source names a report (``REPORT``), or says that there is none (``NO_REPORT``).
    """
    guarantee, _, rest = statement.strip().partition("\n\n")
    found = re.fullmatch(r"(?:.*\n)?Not seen: (?P<unseen>.+)\nSource: (?P<source>.+)", rest.strip(), re.DOTALL)
    lacks = [] if re.fullmatch(r"[^\n]+\.", guarantee) else ["a guarantee in one line"]
    lacks += [f"{part!r} once" for part in ("Not seen: ", "Source: ") if statement.count(part) != 1]
    if found is None:
        return [*lacks, "lines that begin with 'Not seen: ' and then 'Source: ', at its end"]
    lacks += [f"an end of {name!r}" for name, text in found.groupdict().items() if not text.endswith(".")]
    if not (REPORT.search(found["source"]) or NO_REPORT in found["source"]):
        lacks.append(f"a report such as 'Opacus#751', or {NO_REPORT!r}, in its source")
    return lacks


def of_the_chapters() -> dict[str, Law]:
    """Without the toy laws that other tests of this process may have registered."""
    return {name: law for name, law in chapters().items() if "properties." in law.body.__module__}


def test_every_law_says_what_it_cannot_see_and_where_its_bug_happened() -> None:
    laws = of_the_chapters()
    assert len(laws) > 100
    lacks = {name: lacking(law.statement) for name, law in laws.items()}
    assert {name: what for name, what in lacks.items() if what} == {}


def test_statements_name_laws_that_there_are() -> None:
    laws = of_the_chapters()
    chapter = "|".join({name.partition(".")[0] for name in laws})
    named = {found for law in laws.values() for found in re.findall(rf"\b(?:{chapter})\.[a-z-]+\b", law.statement)}
    assert named
    assert named <= laws.keys()


@pytest.mark.parametrize(
    ("old", "new", "lacks"),
    [
        ("Not seen: what is linear and wrong; norms of what\nnobody trains.\n", "", "'Not seen: ' once"),
        ("Source: claim A1; Opacus#751.\n", "", "'Source: ' once"),
        ("Opacus#751", "arXiv:1607.00133", "a report such as"),
        ("\nSource: ", " Source: ", "lines that begin with"),
        ("nobody trains.", "nobody trains", "an end of 'unseen'"),
        ("norms.\n\nOf", "norms. Source: none.\n\nOf", "'Source: ' once"),
        ("Norms are norms.", "Norms\nare norms.", "a guarantee in one line"),
    ],
)
def test_a_statement_without_one_of_its_parts_is_found(old: str, new: str, lacks: str) -> None:
    assert lacking(WHOLE) == []
    assert old in WHOLE
    assert any(what.startswith(lacks) for what in lacking(WHOLE.replace(old, new)))


def test_a_source_may_say_that_no_report_is_known() -> None:
    assert lacking(WHOLE.replace("Opacus#751", NO_REPORT)) == []
