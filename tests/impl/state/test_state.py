"""Checkpoints: what is saved at W ranks one way is what is loaded at W' ranks another way, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsdpcheck.impl.state import plain_data
from tests.common.tables import every_pair
from tests.impl.training import COMBINED, OPTIMIZERS, WAYS, WORLDS, Training, assert_same, flat, paddings, seen, whole

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


def saves(ranks: Ranks, folder: Path, way: str, world_size: int, kind: str = "adam") -> dict[str, Any]:
    """Two steps, then a checkpoint in ``folder``; what was saved."""

    def body(rank: int) -> dict[str, Any]:
        training = Training(WAYS[way], kind, rank, world_size)
        training.step()
        training.step()
        training.save(folder)
        return seen(training.model, training.optimizer)

    return whole(ranks(body, world_size))


def loads(ranks: Ranks, folder: Path, way: str, world_size: int, kind: str = "adam") -> dict[str, Any]:
    """What a new, scrambled training holds after loading."""

    def body(rank: int) -> dict[str, Any]:
        training = Training(WAYS[way], kind, rank, world_size)
        training.scramble()
        training.load(folder)
        assert paddings(training) == set()
        return seen(training.model, training.optimizer) | {"extra": (training.noise.step, training.schedule.last_epoch)}

    of_ranks = ranks(body, world_size)
    assert {found["extra"] for found in of_ranks} == {(2, 2)}
    return whole(of_ranks)


Saved = dict[tuple[str, int], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint by each way at each world size."""
    found = {}
    for way, world_size in COMBINED:
        folder = tmp_path_factory.mktemp(f"{way}-{world_size}")
        found[way, world_size] = folder, saves(ranks, folder, way, world_size)
    return found


@every_pair({"before": WORLDS, "after": WORLDS, "saver": WAYS, "loader": WAYS})
def test_saved_one_way_and_loaded_another(
    ranks: Ranks, saved: Saved, saver: str, before: int, loader: str, after: int
) -> None:
    folder, wanted = saved[saver, before]
    assert_same(loads(ranks, folder, loader, after), wanted)


def test_all_ways_saved_the_same(saved: Saved) -> None:
    first = saved["flat", 1][1]
    assert {name for name in first if name.endswith("max_exp_avg_sq")}
    for _, found in saved.values():
        assert_same(found, first)


def reference(ranks: Ranks, kind: str, steps: int) -> list[dict[str, Any]]:
    def body(rank: int) -> list[dict[str, Any]]:
        training = Training(flat, kind, rank, 1)
        return [training.step() for _ in range(steps)]

    return [whole([found]) for found in ranks(body, 1)[0]]


@every_pair({"kind": OPTIMIZERS, "first": WAYS, "second": WAYS, "third": WAYS})
def test_stopped_twice_equals_never_stopped(
    ranks: Ranks, tmp_path: Path, kind: str, first: str, second: str, third: str
) -> None:
    assert resumed(ranks, tmp_path / "-".join([kind, first, second, third]), kind, (first, second, third)) == ""


def resumed(ranks: Ranks, tmp_path: Path, kind: str, ways: tuple[str, ...]) -> str:
    """Where six steps at 4, 3 and 1 ranks first differ from six steps at one."""
    got: list[dict[str, Any]] = []
    for part, (way, world_size) in enumerate(zip(ways, (4, 3, 1), strict=True)):

        def body(rank: int, part: int = part, way: str = way, world_size: int = world_size) -> list[dict[str, Any]]:
            training = Training(WAYS[way], kind, rank, world_size)
            if part:
                training.load(tmp_path / str(part))
            found = [training.step(), training.step()]
            training.save(tmp_path / str(part + 1))
            return found

        of_ranks = ranks(body, world_size)
        got += [whole([found[step] for found in of_ranks]) for step in range(2)]
    wanted = reference(ranks, kind, 6)
    assert len({found["head.weight"] for found in wanted}) > 3, "the weights hardly move"
    return plain_data.difference(got, wanted)
