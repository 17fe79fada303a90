"""Losses of ranks beside the loss of one: each rank's is its own, and how they belong together is the script's affair.

So no loss is judged. Where something else differs, they say whether it was the forward: a loss of one rank is, in all
honest scripts, the average of all that ranks have given to backward in the step, or their sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from fsdpcheck.comparison.causes import Cause
from fsdpcheck.comparison.observation.whole import Assembled
from fsdpcheck.comparison.record import Key

_TOGETHER: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {"average": torch.mean, "sum": torch.sum}
_SHOWN: Final = 4


def together(whole: Assembled) -> dict[Key, Tensor]:
    """By step the average and the sum of all losses of all ranks, as observables "loss average" and "loss sum"."""
    steps: dict[int, list[Tensor]] = defaultdict(list)
    for key, ranks in whole.by_rank.items():
        steps[key.step] += [value.reshape(-1) for value in ranks.values()]
    return {
        Key(step, f"loss {name}", ""): put_together(torch.cat(values)).reshape(1)
        for step, values in steps.items()
        for name, put_together in _TOGETHER.items()
    }


def told(step: int, base: Assembled, run: Assembled, within: Callable[[Key], bool]) -> Iterator[Cause]:
    """Of the first wrong step, a sentence if neither average nor sum is that of one rank.

    ``within(key)``: whether an observable of ``together`` agrees.
    """
    ours, theirs = _of_ranks(run, step), _of_ranks(base, step)
    if not ours or not theirs or any(within(Key(step, f"loss {name}", "")) for name in _TOGETHER):
        return
    shown = ", ".join(f"{loss:.6g} on rank {rank}" for rank, loss in list(ours.items())[:_SHOWN])
    more = f" and {len(ours) - _SHOWN} more" if len(ours) > _SHOWN else ""
    (wanted,) = list(theirs.values())[:1]
    text = f"losses differ already: {shown}{more}, where one rank has {wanted:.6g}; neither average nor sum is that"
    yield Cause("", text)


def _of_ranks(whole: Assembled, step: int) -> dict[int, float]:
    """Each rank's losses of a step, added."""
    found: dict[int, float] = defaultdict(float)
    for key, ranks in whole.by_rank.items():
        if key.step == step:
            for rank, value in ranks.items():
                found[rank] += float(value.sum())
    return dict(sorted(found.items()))
