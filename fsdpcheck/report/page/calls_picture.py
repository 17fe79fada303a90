"""The calls of a finding's ranks as a picture: a lane a rank, a column a call, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from fsdpcheck.findings.ranks import Call, RankStood
from fsdpcheck.report.page.picture import CHARACTER, Picture, cut

_LEFT: Final = 86.0
_LANE: Final = 46.0
_TOP: Final = 26.0
_WIDE: Final = 18
"""Characters of a call's name that are drawn."""
_NARROW: Final = 9
"""Columns from which on names are short."""
_SHORT: Final = {
    "all_reduce": "AR", "all_gather": "AG", "all_gather_into_tensor": "AG", "reduce_scatter": "RS",
    "reduce_scatter_tensor": "RS", "broadcast": "BC", "barrier": "BAR", "all_to_all": "A2A", "reduce": "RED",
}  # fmt: skip


def drawn(ranks: Sequence[RankStood]) -> Picture | None:
    """The last calls of the ranks, those in one column that are one call; None where nobody called anything."""
    columns, sides = _columns(ranks), _sides(ranks)
    if not columns:
        return None
    short = _is_short(columns)
    longest = max(len(call.op) for own in sides.values() for call in own.values())
    wide = 40.0 if short else CHARACTER * min(longest, _WIDE) + 26
    picture = Picture("Calls of the run that broke the law", "; ".join(map(_sentence, ranks)))
    for number, rank in enumerate(ranks):
        y = _TOP + number * _LANE
        picture.line(_LEFT, y + 13, _LEFT + wide * (max(columns.values()) + 1), y + 13, "lane")
        _lane(picture, rank, y, {key: (_LEFT + at * wide, wide) for key, at in columns.items()}, sides, short)
    _missing(picture, ranks, columns, wide)
    picture.text(_LEFT, 12, "in the order of calls →", "soft")
    return picture


def legend(ranks: Sequence[RankStood]) -> dict[str, str]:
    """Short name -> call, of those that are drawn short."""
    if not _is_short(_columns(ranks)):
        return {}
    return {_abbreviated(call.op): call.op for rank in ranks for call in rank.calls}


def _lane(
    picture: Picture, rank: RankStood, y: float, boxes: Mapping[str, tuple[float, float]],
    sides: Mapping[str, Mapping[int, Call]], short: bool,
) -> None:  # fmt: skip
    """One rank: ``boxes`` has left side and width of the column of each call."""
    picture.text(0, y + 15, f"rank {rank.rank}", "head bad" if _is_bad(rank) else "head")
    picture.text(0, y + 28, cut(_state(rank), 10), "soft", told=rank.state)
    for call in rank.calls:
        left, wide = boxes[call.key]
        apart = len({(one.op, one.what) for one in sides[call.key].values()}) > 1
        look = "call bad" if call.key == rank.blocked_in else "call odd" if apart else "call"
        told = call.what + (f", at {call.where}" if call.where else "")
        picture.rect(left + 4, y, wide - 8, 26, look, told)
        name = _abbreviated(call.op) if short else cut(call.op, _WIDE)
        picture.text(left + wide / 2, y + 17, name, "oncall", "middle")


def _is_short(columns: Mapping[str, int]) -> bool:
    return max(columns.values(), default=0) >= _NARROW


def _columns(ranks: Sequence[RankStood]) -> dict[str, int]:
    """Key of a call -> its column, right of all that its ranks called before: calls of others may stand beside it."""
    last: dict[int, int] = {}
    columns: dict[str, int] = {}
    sides = _sides(ranks)
    for key in _ordered(ranks):
        columns[key] = 1 + max(last.get(rank, -1) for rank in sides[key])
        last |= dict.fromkeys(sides[key], columns[key])
    return columns


def _missing(picture: Picture, ranks: Sequence[RankStood], columns: Mapping[str, int], column: float) -> None:
    """Where a rank is waited for: an empty box in its lane, and a line from who waits."""
    lanes = {rank.rank: number for number, rank in enumerate(ranks)}
    for rank in (one for one in ranks if one.blocked_in in columns):
        x, own = _LEFT + (columns[rank.blocked_in] + 0.5) * column, lanes[rank.rank]
        for other in (one for one in rank.waits_for if one in lanes):
            y = _TOP + lanes[other] * _LANE
            told = f"rank {other} never came; rank {rank.rank} waits for it"
            picture.rect(x - column / 2 + 4, y, column - 8, 26, "never", told)
            picture.text(x, y + 17, "never" if column > 48 else "✕", "bad", "middle")
            ends = (_TOP + own * _LANE + 26, y) if own < lanes[other] else (_TOP + own * _LANE, y + 26)
            picture.line(x, ends[0], x, ends[1], "wait")


def _ordered(ranks: Sequence[RankStood]) -> list[str]:
    """Keys of calls in an order in which every rank made them, as far as there is one."""
    left = [[call.key for call in rank.calls] for rank in ranks]
    order: list[str] = []
    while any(left):
        heads = [own[0] for own in left if own]
        ready = (key for key in heads if all(key not in own or own[0] == key for own in left))
        key = next(ready, heads[0])
        order.append(key)
        left = [[one for one in own if one != key] for own in left]
    return order


def _sides(ranks: Sequence[RankStood]) -> dict[str, dict[int, Call]]:
    sides: dict[str, dict[int, Call]] = {}
    for rank in ranks:
        for call in rank.calls:
            sides.setdefault(call.key, {})[rank.rank] = call
    return sides


def _sentence(rank: RankStood) -> str:
    if rank.waits_for:
        others = ", ".join(map(str, rank.waits_for))
        op = next((call.op for call in rank.calls if call.key == rank.blocked_in), "a call")
        return f"rank {rank.rank} is blocked in {op} and waits for rank {others}"
    return f"rank {rank.rank}: {rank.state}, {len(rank.calls) + rank.earlier} calls"


def _state(rank: RankStood) -> str:
    return "waits" if rank.state == "blocked" else rank.state


def _is_bad(rank: RankStood) -> bool:
    return rank.state not in ("finished", "running")


def _abbreviated(op: str) -> str:
    return _SHORT.get(op, "".join(part[:1] for part in op.split("_")).upper()[:4] or "?")
