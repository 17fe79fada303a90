"""Causes of one case and of several: what fits all of them, and what is said where two mistakes are mixed."""

from __future__ import annotations

import pytest

from fsdpcheck.findings.cause import EXACT, WEAK, Cause, Causes, common, named

ROWS = Cause("rows", "rows are not merged")
SHIFTED = Cause("shifted", "patches are shifted")
FIRST = Cause("first", "the first sample is off", WEAK)


def told(first: Causes | None, *others: Causes | None, apart: tuple[Causes | None, ...] = ()) -> str:
    return named(common(first, others, apart))


def test_of_two_mistakes_that_are_mixed_each_case_has_its_own_named() -> None:
    of_rows, of_patches = [[ROWS, FIRST]] * 2, [[SHIFTED, FIRST]] * 3
    assert told([ROWS, FIRST], *of_rows, *of_patches) == ROWS.text
    assert told([SHIFTED], *of_rows, *of_patches) == SHIFTED.text


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([[ROWS], [SHIFTED]], id="one other case is none of a mistake of its own"),
        pytest.param([[SHIFTED], [SHIFTED]], id="no other case has the cause of the first"),
        pytest.param([[ROWS], [FIRST], [FIRST]], id="what fits any small case is no mistake of its own"),
        pytest.param([[ROWS], [], []], id="a case that nothing fits speaks against it"),
    ],
)
def test_a_cause_needs_cases_of_its_own_and_others_a_cause_of_theirs(others: list[Causes]) -> None:
    assert told([ROWS], *others) == ""


def test_a_mistake_that_the_first_case_shows_too_is_no_other() -> None:
    """Where both fit the first, the smallest, cases of one of them decide."""
    assert told([ROWS, SHIFTED], [ROWS], [ROWS], [SHIFTED], [SHIFTED]) == ""


def test_cases_that_fail_as_they_are_where_the_first_holds_do_not_count_where_all_together_name_nothing() -> None:
    weak = ROWS._replace(strength=WEAK)
    others: list[Causes] = [[ROWS], [ROWS]]
    assert told([weak], *others, [], [SHIFTED]) == "", "one case of another mistake is none yet"
    assert told([weak], *others, apart=([], [SHIFTED])) == ROWS.text
    assert told([weak], *others, apart=([ROWS, SHIFTED], [SHIFTED])) == ROWS.text


def test_what_fits_all_stands_whatever_is_apart() -> None:
    assert told([ROWS, SHIFTED], [SHIFTED], apart=([SHIFTED],)) == SHIFTED.text
    assert told(None, [ROWS], [ROWS], apart=([SHIFTED],)) == "", "a first case that cannot tell sets none aside"
    assert EXACT < WEAK
