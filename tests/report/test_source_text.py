"""Source text under file:line."""

from __future__ import annotations

from pathlib import Path

from fsdpcheck.report.source_text import with_source


def test_what_stands_at_a_place_is_below_its_first_mention(tmp_path: Path) -> None:
    file = tmp_path / "my train.py"
    file.write_text(f"first = 1\n    loss.backward()  # \x1b[31m\n{'x' * 200}\n")
    text = (
        f"deadlock\n  rank 0: in all_reduce, at {file}:2\n  rank 1: in all_reduce, at {file}:2\n  rank 2: at {file}:3"
    )
    assert with_source(text).splitlines() == [
        "deadlock",
        f"  rank 0: in all_reduce, at {file}:2",
        "    > loss.backward()  # \\x1b[31m",
        f"  rank 1: in all_reduce, at {file}:2",
        f"  rank 2: at {file}:3",
        f"    > {'x' * 100}...",
    ]


def test_a_place_that_is_not_here_has_nothing_below_it(tmp_path: Path) -> None:
    for text in (f"at {tmp_path}/gone.py:3", "at train.py:0", "see file.py:3, and more", "x at nothing"):
        assert with_source(text) == text
