"""A table in one test: every row is tried, every wrong one is named, and none is skipped unseen; settings by pairs."""

from __future__ import annotations

import inspect
import itertools

import pytest

from tests.common.tables import WrongRows, each, every_pair, pairwise


def test_every_row_is_tried_and_every_wrong_one_is_named() -> None:
    tried: list[tuple[int, str]] = []

    @each("number", [1, 2, 3])
    @each(("word", "other"), [("a", "b"), ("c", "d")], ids=["first", "second"])
    def body(number: int, word: str, other: str) -> None:
        tried.append((number, word + other))
        assert number != 2 or word == "c", "two and a"
        if number == 3:
            raise LookupError("three")

    with pytest.raises(WrongRows) as caught:
        body()
    assert tried == [(number, words) for number in (1, 2, 3) for words in ("ab", "cd")]
    assert list(caught.value.wrong) == ["2-first", "3-first", "3-second"]
    assert str(caught.value).startswith("3 of 6 rows:\n[2-first] AssertionError: two and a")
    assert "LookupError: three" in str(caught.value)
    assert __file__ in str(caught.value)


def test_rows_that_are_right_pass() -> None:
    @each("number", [1, 2])
    def body(number: int) -> None:
        assert number

    body()


def test_a_row_that_skips_or_does_not_raise_is_wrong() -> None:
    @each("what", ["skips", "raises nothing"])
    def body(what: str) -> None:
        if what == "skips":
            pytest.skip("no reason")
        with pytest.raises(ValueError, match="never"):
            pass

    with pytest.raises(WrongRows, match=r"(?s)2 of 2 rows.*a row may not skip.*DID NOT RAISE"):
        body()


def test_rows_of_one_name_are_told_apart() -> None:
    @each("row", [[1], [1]])
    def body(row: list[int]) -> None:
        raise ValueError

    with pytest.raises(WrongRows) as caught:
        body()
    assert list(caught.value.wrong) == ["[1] (row 0)", "[1] (row 1)"]


def test_what_is_left_are_fixtures_and_what_is_no_argument_is_refused() -> None:
    def body(tmp_path: object, row: int) -> None: ...

    assert list(inspect.signature(each("row", [1])(body)).parameters) == ["tmp_path"]
    with pytest.raises(AssertionError, match="are no arguments of"):
        each("rows", [1])(body)
    with pytest.raises(AssertionError, match="asserts nothing"):
        each("row", [])


@pytest.mark.parametrize("sizes", [(4, 4, 3, 2, 2), (9, 4, 4, 2), (2, 3), (1, 5, 1)])
def test_in_rows_by_pairs_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    rows = pairwise(itertools.product(*map(range, sizes)))
    for (i, first), (j, second) in itertools.combinations(enumerate(sizes), 2):
        met = {(row[i], row[j]) for row in rows}
        assert len(met) == first * second
    largest, next_largest, *_ = sorted(sizes, reverse=True)
    assert len({*rows}) == len(rows) <= 1.5 * largest * next_largest


def test_settings_are_tried_by_pairs_by_day_and_all_by_night() -> None:
    tried: list[tuple[int, int, str, bool]] = []

    @every_pair({"a": [0, 1], "b, word": [(0, "x"), (1, "y"), (2, "z")], "odd": [False, True]})
    def body(tmp_path: object, a: int, b: int, word: str, odd: bool) -> None:
        tried.append((a, b, word, odd))
        assert (a, b) != (1, 2)

    assert list(inspect.signature(body).parameters) == ["tmp_path", "combined"]
    (mark,) = body.pytestmark  # type: ignore[attr-defined]
    by_day, by_night = mark.args[1]
    assert (by_day, by_night.values, by_night.marks[0].name) == ("pairs", ("all",), "nightly")
    with pytest.raises(WrongRows, match=r"1 of 6 rows:\n\[1-2-z-(True|False)\]"):
        body(tmp_path=None, combined="pairs")
    assert len(tried) == len({*tried}) == 6
    tried.clear()
    with pytest.raises(WrongRows, match=r"2 of 12 rows:\n\[1-2-z-False\](?s:.*)\n\[1-2-z-True\]"):
        body(tmp_path=None, combined="all")
    assert len({*tried}) == 12
    tried.clear()
    without = every_pair(
        {"a": [0, 1], "b, word": [(0, "x")], "odd": [False, True]}, lambda row: bool(row["a"] and row["odd"])
    )
    without(body.__wrapped__)(tmp_path=None, combined="pairs")  # type: ignore[attr-defined]
    assert {*tried} == {(0, 0, "x", False), (0, 0, "x", True), (1, 0, "x", False)}
    with pytest.raises(AssertionError, match="are no arguments of"):
        every_pair({"lost": [1]})(body)
