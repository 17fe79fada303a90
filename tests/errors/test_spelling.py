"""The nearest name: of a word, and of a pattern of dotted names."""

from __future__ import annotations

import pytest

from fsdpcheck.errors import spelling

LAWS = ("norms.mixed", "norms.scaling", "training.plain")


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("norms", "norms.*"),
        ("nomrs.*", "norms.*"),
        ("norms.mixt", "norms.mixed"),
        ("trainning.plain", "training.plain"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_a_glob_that_matches_nothing_is_answered_with_what_was_meant(glob: str, meant: str) -> None:
    assert spelling.hint_of_glob(glob, LAWS) == (f" Did you mean {meant!r}?" if meant else "")
