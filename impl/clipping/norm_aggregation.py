"""Aggregation of squared per-sample norms over the ranks of one mesh axis.

*Layout* belongs to the batch on the axis: "replicated" (every rank has the same samples) or "distributed" (each has its
own). *Contribution* belongs to a parameter on the axis: "complete" (each rank can form its samples' whole term) or
"partial" (each rank forms the part of the elements that it owns).

| layout      | complete terms                         | partial terms                                        |
|-------------|----------------------------------------|------------------------------------------------------|
| replicated  | once: every rank already has the value | all-reduce SUM over the axis                         |
| distributed | once: only this rank has these samples | refused: elements and samples are split the same way |

Terms of both kinds are added, the complete ones once, *before* the one square root. With several axes, aggregate one
axis after another: what comes out of one is complete on it. With full gathers in forward and backward (FSDP, HSDP) a
rank sees whole weights and its own samples: distributed and complete, so no communication at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..sharding import collectives
from ..sharding.collectives import Axis, Subject

Layout = Literal["replicated", "distributed"]
Contribution = Literal["complete", "partial"]

NORMS = Subject("(per-sample norms)")
INDICES = Subject("(sample indices)")
_NOBODY = -1
"""In place of an index, where a rank has fewer samples than the bound."""


@dataclass(frozen=True)
class Terms:
    """Sums of squared-norm terms [b] by contribution; ``partial`` is None when no parameter contributes that way."""

    complete: Tensor
    partial: Tensor | None = None


@dataclass(frozen=True)
class InDatasetOrder:
    """Values of all ranks sorted by global sample index. ``duplicates``: indices that occur more than once."""

    indices: Tensor
    values: Tensor
    duplicates: tuple[int, ...]


def refuse_impossible(layout: Layout, contributions: Sequence[Contribution]) -> None:
    """Raise ValueError for partial contributions on an axis over which samples are distributed."""
    if layout == "distributed" and "partial" in contributions:
        raise ValueError(
            "per-sample norms cannot be put together: on this axis both the samples and the parameters' elements are "
            "split, so no rank holds the missing parts of any sample; use complete contributions or a replicated batch"
        )


def squared_norms(terms: Terms, layout: Layout, axis: Axis) -> Tensor:
    """[b]: squared norm of each local sample's whole gradient, by the table above.

    Communicates once if there are partial terms, and not at all otherwise.
    """
    if terms.partial is None:
        return terms.complete
    refuse_impossible(layout, ["partial"])
    return terms.complete + sum_over(terms.partial, axis)


def joined(terms: Sequence[Terms]) -> Terms:
    """Terms of several micro-batches, end to end, so that one collective puts them together."""
    partial = [one.partial for one in terms if one.partial is not None]
    return Terms(torch.cat([one.complete for one in terms], -1), torch.cat(partial, -1) if partial else None)


def sum_over(partial: Tensor, axis: Axis) -> Tensor:
    """Partial terms [b] summed over the axis: every rank gets the whole."""
    return collectives.all_reduce_sum(NORMS, partial.clone(), axis)


def gather_in_dataset_order(values: Tensor, indices: Sequence[int], bound: int, axis: Axis) -> InDatasetOrder:
    """Per-sample ``values`` [b] of every rank, sorted by global sample index; for reports, clipping needs none of it.

    Each rank sends exactly ``bound`` pairs, so that local sizes, which are private under Poisson sampling, do not show.
    Raises ValueError when a rank has more than ``bound`` samples, or one with a negative index.
    """
    if len(indices) != len(values) or len(values) > bound:
        raise ValueError(
            f"{len(values)} values and {len(indices)} indices do not fit a public bound of {bound}: give one index a"
            " value, and a bound that holds on every rank"
        )
    if min(indices, default=0) < 0:
        raise ValueError(f"got the sample index {min(indices)}, wanted none below 0: {_NOBODY} stands for no sample")
    own = torch.tensor(list(indices), dtype=torch.int64, device=values.device)
    all_indices = _gather(INDICES, torch.nn.functional.pad(own, (0, bound - len(own)), value=_NOBODY), axis)
    all_values = _gather(NORMS, torch.nn.functional.pad(values.detach(), (0, bound - len(own))), axis)
    present = all_indices != _NOBODY
    return in_dataset_order(all_indices[present], all_values[present])


def in_dataset_order(indices: Tensor, values: Tensor) -> InDatasetOrder:
    """Sort by index; equal indices keep the order of the ranks."""
    order = torch.argsort(indices, stable=True)
    counted, counts = torch.unique(indices, return_counts=True)
    return InDatasetOrder(indices[order], values[order], tuple(counted[counts > 1].tolist()))


def _gather(subject: Subject, own: Tensor, axis: Axis) -> Tensor:
    everyone = own.new_empty(own.numel() * axis.size)
    collectives.all_gather(subject, everyone, own, axis)
    return everyone
