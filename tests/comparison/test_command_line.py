"""The command line of a script as a function of the number of ranks."""

from __future__ import annotations

import pytest

from fsdpcheck.comparison.command_line import read
from fsdpcheck.errors import UsageError


@pytest.mark.parametrize(
    ("text", "at_two", "at_four"),
    [
        ("train.py --batch-size {16//W}", ("train.py", "--batch-size", "8"), ("train.py", "--batch-size", "4")),
        ("train.py --lr {0.1/W} -q", ("train.py", "--lr", "0.05", "-q"), ("train.py", "--lr", "0.025", "-q")),
        ("train.py --n={(W+2)*3 - 1}", ("train.py", "--n=11"), ("train.py", "--n=17")),
        ("-m a.b '{{W}}' {2**W/2}", ("-m", "a.b", "{W}", "2"), ("-m", "a.b", "{W}", "8")),
        ("python train.py {-W % 7}", ("train.py", "5"), ("train.py", "3")),
        ("train.py {max(1, W//3)} {8*min(3, W)//W}", ("train.py", "1", "8"), ("train.py", "1", "6")),
    ],
)
def test_braces_hold_arithmetic_over_the_number_of_ranks(
    text: str, at_two: tuple[str, ...], at_four: tuple[str, ...]
) -> None:
    line = read(text)
    assert (line.words_at(2), line.words_at(4)) == (at_two, at_four)


def test_a_number_with_a_name_can_be_made_smaller() -> None:
    line = read("train.py --layers {layers:4} --batch {8//W}")
    assert line.marked == {"layers": 4}
    assert line.words_at(2) == ("train.py", "--layers", "4", "--batch", "4")
    assert line.words_at(2, {"layers": 1}) == ("train.py", "--layers", "1", "--batch", "4")


def test_ranks_that_do_not_divide_the_batch_are_refused_with_one_that_they_do() -> None:
    with pytest.raises(UsageError) as raised:
        read("train.py --batch-size {16//W}").words_at(3)
    assert str(raised.value).splitlines() == [
        "16 is not divided by 3, so 3 ranks would do other work than one",
        "  got     16 // 3 at W = 3",
        "  wanted  a multiple of 3, 18 say",
        "  next    change the number, or leave this number of ranks out of --ranks",
        "  where   {16//W} of train.py --batch-size {16//W}",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a script is missing"),
        ("-m", "a script is missing"),
        ("'train.py", "cannot be read"),
        ("train.py {16//w}", "'w' is none of them"),
        ("train.py {open('x')}", "is none of them"),
        ("train.py {16//}", "braces hold arithmetic over W"),
        ("train.py {1/0}", "division by zero"),
        ("train.py {True}", "'True' is none of them"),
        ("train.py {W.real}", "is none of them"),
        ("train.py {max(W)}", "is none of them"),
    ],
)
def test_a_line_that_is_none_is_refused_in_words(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        read(text)
