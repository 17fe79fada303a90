"""Golden vectors: a change of one of these is a change of every replay token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fsdpcheck
from fsdpcheck.case import prng


def test_integers_are_frozen() -> None:
    assert prng.integers(0, "a", (5,), -3, 3).tolist() == [2, 2, 0, -1, -2]
    wide = prng.integers(2**63 + 5, "b", (2, 3), 0, 10**6)
    assert wide.tolist() == [[832931, 874075, 478072], [862016, 915886, 82028]]
    assert prng.integers(7, "parameter linear0.weight", (2, 2), -1, 1).dtype == np.int64


def test_symmetric_integers_are_frozen() -> None:
    assert prng.symmetric(0, "a", (12,), 1).tolist() == [1, 1, 0, -1, -1, 1, -1, -1, 1, 1, -1, -1]
    assert prng.symmetric(9, "b", (12,), 3).tolist() == [-3, -1, 1, 1, 1, -3, 3, -2, 3, 3, -2, -2]


def test_fractions_are_frozen() -> None:
    found = prng.fractions(0, "a", (3,), 30)
    assert (found * 2**30).tolist() == [764159451, 731225293, 55583760]
    assert found.dtype == np.float64
    many = prng.fractions(4, "x", (4000,), 2)
    assert set(many.tolist()) == {k / 4 for k in range(-4, 5)}


@pytest.mark.parametrize("bound", [1, 2, 5])
def test_symmetric_draws_zero_half_as_often(bound: int) -> None:
    drawn = prng.symmetric(3, "x", (20_000,), bound).tolist()
    assert set(drawn) == set(range(-bound, bound + 1))
    others = (len(drawn) - drawn.count(0)) / (2 * bound)
    assert 0.4 < drawn.count(0) / others < 0.6


def test_permutation_is_frozen() -> None:
    assert prng.permutation(1, "p", 8) == (6, 5, 1, 3, 0, 2, 7, 4)
    assert prng.permutation(1, "p", 0) == ()


def test_another_process_gives_the_same_values() -> None:
    script = "from fsdpcheck.case import prng; print(prng.integers(3, 'stream', (4,), 0, 999).tolist())"
    beside = {**os.environ, "PYTHONPATH": str(Path(fsdpcheck.__file__).parent.parent)}
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=beside)
    assert other.stdout.strip() == str(prng.integers(3, "stream", (4,), 0, 999).tolist())


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    longer = prng.integers(5, "x", (40,), -9, 9)
    assert prng.integers(5, "x", (7,), -9, 9).tolist() == longer[:7].tolist()


@pytest.mark.parametrize(("low", "high"), [(0, 0), (-1, 1), (-3, 4), (0, 2**31)])
def test_both_ends_are_included_and_nothing_beyond(low: int, high: int) -> None:
    drawn = prng.integers(11, "range", (4000,), low, high)
    assert drawn.min() >= low
    assert drawn.max() <= high
    if high - low < 100:
        assert set(drawn.tolist()) == set(range(low, high + 1))


def test_streams_and_seeds_differ() -> None:
    one = prng.integers(0, "a", (64,), 0, 999).tolist()
    assert one != prng.integers(1, "a", (64,), 0, 999).tolist()
    assert one != prng.integers(0, "b", (64,), 0, 999).tolist()


@pytest.mark.parametrize(("low", "high"), [(1, 0), (0, 2**32)])
def test_a_range_that_cannot_be_drawn_is_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match="wanted low <= high"):
        prng.integers(0, "a", (1,), low, high)


@pytest.mark.parametrize("n", [1, 2, 7, 100])
def test_permutations_are_permutations(n: int) -> None:
    assert sorted(prng.permutation(n, "order", n)) == list(range(n))
