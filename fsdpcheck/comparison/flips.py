"""What noise of rounding makes an operator choose otherwise: the reason why nothing can be decided of what follows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsdpcheck.comparison.record import Choice, Observation

_WORDS = {
    **dict.fromkeys(("eq", "ge", "gt", "isin", "le", "lt", "ne"), "a comparison"),
    "_to_copy": "a cast to integers",
}


def first_flip(clean: Observation, noisy: Sequence[Observation]) -> str:
    """A sentence about the first choice that noise changes in most of these runs; "" where it changes none."""
    found: dict[tuple[int, int], list[int]] = {}
    for run in noisy:
        if (flip := min(_flips(clean, run), default=None)) is not None:
            found.setdefault(flip[:2], []).append(flip[2])
    if not found:
        return ""
    (place, rank), many = min(found.items())
    choice = clean.ranks[rank].choices[place]
    most = f"{max(many)} of the {len(choice.made)} values" if max(many) > 1 else f"one of the {len(choice.made)} values"
    what = _WORDS.get(choice.operator, choice.operator)
    where = f"at {choice.line or 'an unknown line'} on rank {rank}"
    return f"noise of rounding changes {most} that {what} gives {where}; what it is given is tied there, or nearly so"


def _flips(clean: Observation, run: Observation) -> Iterator[tuple[int, int, int]]:
    """(place, rank, how many values) of the first choice of each rank that is not that of the clean run."""
    for rank, (one, other) in enumerate(zip(clean.ranks, run.ranks, strict=True)):
        for place, (mine, theirs) in enumerate(zip(one.choices, other.choices, strict=False)):
            if not _are_of_one(mine, theirs):
                break  # another way through the script, taken for a reason that was not seen
            if many := int((mine.made != theirs.made).sum()):
                yield place, rank, many
                break


def _are_of_one(one: Choice, other: Choice) -> bool:
    return (one.operator, one.line, one.made.shape) == (other.operator, other.line, other.made.shape)
