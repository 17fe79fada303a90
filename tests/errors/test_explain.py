"""One way to word an error: a line for each part, in one order, and none for what is not said."""

from __future__ import annotations

from fsdpcheck.errors import explain


def test_the_parts_come_in_one_order_and_one_column() -> None:
    said = explain("it is wrong", then="look again", where="rank 1", wanted="2", got="1")
    assert said == "it is wrong\n  got     1\n  wanted  2\n  where   rank 1\n  next    look again"


def test_what_is_not_said_has_no_line_and_a_zero_has_one() -> None:
    assert explain("it is wrong") == "it is wrong"
    assert explain("it is wrong", got=0, wanted=False) == "it is wrong\n  got     0\n  wanted  False"
