"""The groups that ranks make: all of them, members or not, must make the same ones in the same order.

torch numbers groups by how many a rank has made, so ranks that make others, or in another order, have groups of one
name that are not one group. On gloo their members connect to whoever has the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from fsdpcheck.execution import Failure, RankState
from fsdpcheck.execution.matching import ranks_text

_SEVERAL = 3
"""Groups of the same ranks made at one line, and none ended, from which on that is worth a note."""


@dataclass(frozen=True, slots=True)
class _Made:
    rank: int
    ranks: tuple[int, ...]
    where: str
    which: tuple[str, int]


class GroupsMade:
    """What ranks have made so far."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, int], _Made] = {}
        self._times: Counter[tuple[int, str]] = Counter()
        self._names: dict[tuple[int, tuple[int, ...], str], list[str]] = {}
        self._waits: dict[int, list[_Made]] = {}
        self._piled: dict[tuple[tuple[int, ...], str], dict[int, int]] = {}

    def make(
        self, rank: int, name: str, ranks: tuple[int, ...], where: str, alive: frozenset[str], *, waits: bool = False
    ) -> Failure | None:
        """A rank makes a group; what is wrong if another made one of this name of other ranks.

        Groups of one rank each connect to nobody, so they may share a name: ``new_subgroups(1, group=...)`` makes such.
        ``alive``: names of the groups that it has. ``waits``: its backend waits for all members, as gloo does."""
        self._times[rank, name] += 1
        now = _Made(rank, ranks, where, (name, self._times[rank, name]))
        if waits and rank in ranks:
            self._waits.setdefault(rank, []).append(now)
        before = self._first.setdefault((name, self._times[rank, name]), now)
        names = self._names.setdefault((rank, ranks, where), [])
        names[:] = [*(other for other in names if other in alive), name]
        if len(names) >= _SEVERAL:
            self._piled.setdefault((ranks, where), {})[rank] = len(names)
        agreed = before.ranks == ranks or len(before.ranks) == len(ranks) == 1
        return None if agreed else _disagree(name, before, now)

    def ring(self, world_size: int) -> Failure | None:
        """What is wrong with groups that wait for all members, if ranks make them in orders that are a ring."""
        at = dict.fromkeys(range(world_size), 0)

        def standing(rank: int) -> _Made | None:
            made = self._waits.get(rank, [])
            return made[at[rank]] if at[rank] < len(made) else None

        def is_there(rank: int, made: _Made) -> bool:
            return (other := standing(rank)) is not None and other.which == made.which

        while ready := next(
            (made for made in map(standing, at) if made and all(is_there(rank, made) for rank in made.ranks)), None
        ):
            for rank in ready.ranks:
                at[rank] += 1
        way: list[_Made] = []
        made = next((made for made in map(standing, at) if made), None)
        while made is not None and made not in way:
            way.append(made)
            made = next((there for rank in made.ranks if (there := standing(rank)) and there.which != made.which), None)
        return _ring([*way[way.index(made) :]]) if made is not None else None

    def unfinished(self, world_size: int) -> Failure | None:
        """What is wrong with groups that some of their members have not made, when all have come to their end."""
        for (name, times), made in self._first.items():
            members = made.ranks or tuple(range(world_size))
            absent = [rank for rank in members if self._times[rank, name] < times]
            if absent:
                what = f"new_group({list(made.ranks)})" if made.ranks else "init_process_group()"
                text = (
                    f"deadlock: group {name!r} is not made by all of its members; gloo waits for them\n"
                    f"  rank {made.rank}: {what}, at {made.where}\n  missing: {ranks_text(absent)}"
                )
                return Failure("deadlock", text, (RankState(made.rank, "making a group", "", made.where),))
        return None

    def notes(self) -> Iterator[str]:
        """Groups that were made again and again."""
        for (ranks, where), counts in self._piled.items():
            whose = ", ".join(map(str, sorted(counts)))
            yield (
                f"leak: ranks {whose} made {max(counts.values())} groups of ranks {list(ranks)} at {where}, and ended "
                f"none before the next"
            )


def _ring(way: list[_Made]) -> Failure:
    head = "deadlock: ranks make groups in orders that are a ring; gloo waits for all members of each"
    lines = [f"  rank {made.rank}: new_group({list(made.ranks)}), at {made.where}" for made in way]
    states = tuple(RankState(made.rank, "making a group", "", made.where) for made in way)
    return Failure("deadlock", "\n".join([head, *lines]), states)


def _disagree(name: str, one: _Made, other: _Made) -> Failure:
    lines = [f"  rank {made.rank}: new_group({list(made.ranks)}), at {made.where}" for made in (one, other)]
    head = f"mismatch: ranks disagree about group {name!r}: all of them must make the same groups in the same order"
    states = tuple(RankState(made.rank, "making a group", "", made.where) for made in (one, other))
    return Failure("mismatch", "\n".join([head, *lines]), states)
