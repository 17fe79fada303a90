"""Which records share parameters, be it through others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fsdpcheck.impl.clipping import tied_parameters


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], []),
        (["a", "b", "c"], [[0], [1], [2]]),
        (["a", "b", "a"], [[0, 2], [1]]),
        (["a", "b", "ab"], [[0, 1, 2]]),
        (["a", "b", "ab", "b", "c"], [[0, 1, 2, 3], [4]]),
        (["ad", "bc", "ab", "d"], [[0, 1, 2, 3]]),
        (["a", "bc", "d", "ab", "c", "cd"], [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_records_that_share_a_parameter_are_one_group(names: list[str], wanted: list[list[int]]) -> None:
    """Each letter is a parameter, each word a record."""
    records: Any = [SimpleNamespace(layer=SimpleNamespace(names=dict(enumerate(word)))) for word in names]
    assert tied_parameters.groups(records) == wanted
