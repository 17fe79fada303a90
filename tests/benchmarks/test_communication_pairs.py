"""The corpus of communication bugs: as many pairs as it promises, each with what a judge needs, a third frozen."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.communication", reason="only a checkout has the benchmarks")
from benchmarks.communication.pairs import FROZEN, KINDS, Pair, frozen_digests, pairs

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

MPI_BUGBENCH = {
    "invalid parameter", "resource leak", "request lifecycle", "epoch lifecycle", "local concurrency",
    "parameter matching", "message race", "call ordering", "global concurrency",
}  # fmt: skip
SIMULATOR = {
    "op type differs", "reduction differs", "shape differs", "dtype differs", "call skipped",
    "same shape, other order", "root differs", "read before wait", "write in flight",
}  # fmt: skip
"""What was planted to compare simulated ranks with the tools that there are."""


@pytest.fixture(scope="module")
def corpus() -> tuple[Pair, ...]:
    return pairs()


def test_there_are_pairs_enough_in_every_class(corpus: tuple[Pair, ...]) -> None:
    classes = Counter(pair.class_ for pair in corpus)
    assert len(corpus) >= 126
    assert len(classes) >= 20
    assert set(classes) >= MPI_BUGBENCH | SIMULATOR
    assert {class_ for class_, count in classes.items() if count < 2} == set()
    assert [name for name, count in Counter(pair.name for pair in corpus).items() if count > 1] == []


def test_a_third_is_frozen(corpus: tuple[Pair, ...]) -> None:
    assert 3 * sum(bool(pair.frozen) for pair in corpus) >= len(corpus)


@pytest.mark.parametrize("folder", FROZEN)
def test_frozen_pairs_are_of_all_classes(folder: str, corpus: tuple[Pair, ...]) -> None:
    assert {pair.class_ for pair in corpus if pair.frozen == folder} == {pair.class_ for pair in corpus}


@pytest.mark.parametrize("folder", FROZEN)
def test_frozen_files_are_what_they_were(folder: str) -> None:
    known = Path(__file__).parents[2] / "benchmarks" / "communication" / f"{folder}.json"
    assert frozen_digests(folder) == json.loads(known.read_text(encoding="utf-8")), (
        "next: put the file back; it is frozen"
    )


def test_each_pair_says_what_a_judge_must_find(corpus: tuple[Pair, ...]) -> None:
    for pair in corpus:
        expected = pair.expected
        assert 2 <= pair.world_size <= 4, pair.name
        assert expected.kinds, pair.name
        assert set(expected.kinds) <= set(KINDS), pair.name
        assert set(expected.ranks) < set(range(pair.world_size)), pair.name
        assert pair.lines, f"{pair.name}: got no line with '# here', wanted at least one"
        assert pair.program.__doc__, pair.name


def test_every_kind_of_verdict_is_asked_for(corpus: tuple[Pair, ...]) -> None:
    assert {kind for pair in corpus for kind in pair.expected.kinds} == set(KINDS)
