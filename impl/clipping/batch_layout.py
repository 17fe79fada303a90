"""Batch layout: whether ranks have the same samples or their own, found out from the samples.

One small all-gather of a 64-bit fingerprint of each rank's rows. Ranks that differ are certainly "distributed". Ranks
that agree may be replicated, or distributed with equal rows (a data set that repeats a record, a wrap-around
duplicate): no look at the rows can tell, so that case is an error that asks. It is decided where the ranks hold several
rows, all different, in the same order: "replicated", unless the data set itself consists of copies, which only its
owner knows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..sharding import collectives
from ..sharding.collectives import Axis, Subject
from .norm_aggregation import Layout

FINGERPRINTS = Subject("(sample fingerprints)")


@dataclass(frozen=True)
class Layouts:
    """How a batch is laid out over the ranks that shard parameters, and over replicas of the shards (HSDP)."""

    shards: Layout = "distributed"
    replicas: Layout = "distributed"

    def shares(self, axis: Axis, replicas: Axis) -> int:
        """Into how many parts the logical batch is split."""
        return (axis.size if self.shards == "distributed" else 1) * (
            replicas.size if self.replicas == "distributed" else 1
        )

    def share(self, axis: Axis, replicas: Axis) -> tuple[int, int]:
        """(number of this rank's part of the logical batch, how many parts there are)."""
        number = 0
        for layout, each in ((self.replicas, replicas), (self.shards, axis)):
            if layout == "distributed":
                number = number * each.size + each.rank
        return number, self.shares(axis, replicas)


DISTRIBUTED = Layouts()
"""Every rank has samples of its own."""
REPLICATED = Layouts("replicated", "replicated")
"""All ranks have the same samples."""


class AmbiguousLayout(ValueError):
    """All ranks hold equal rows, and too few or too equal ones to conclude that the batch is replicated."""


def detect(inputs: Tensor, axis: Axis) -> Layout:
    """The layout of a batch whose local rows are ``inputs`` [b, ...]; every rank gets the same answer, or the error.

    Raises AmbiguousLayout, on all ranks, when all have equal rows that are fewer than two or not all different.
    """
    if axis.size == 1:
        return "distributed"
    own = torch.tensor([_fingerprint(inputs), _telling(inputs)], dtype=torch.int64, device=inputs.device)
    everyone = own.new_empty(2 * axis.size)
    collectives.all_gather(FINGERPRINTS, everyone, own, axis)
    prints, telling = everyone.view(axis.size, 2).unbind(1)
    if bool((prints != prints[0]).any()):
        return "distributed"
    if bool(telling.all()):
        return "replicated"
    raise AmbiguousLayout(
        f"all {axis.size} ranks hold the same {len(inputs)} rows: the batch is replicated, or distributed with equal"
        " samples, which cannot be told from the rows; say which with Options.layout"
    )


def detect_both(inputs: Tensor, axis: Axis, replicas: Axis) -> Layouts:
    """``detect`` over the axis of the shards, then over that of the replicas."""
    return Layouts(detect(inputs, axis), detect(inputs, replicas))


def _fingerprint(inputs: Tensor) -> int:
    """63 bits of a hash over shape, dtype and bytes of the rows, in their order."""
    rows = inputs.detach().cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(rows.shape)} {rows.dtype}".encode(), digest_size=8)
    digest.update(rows.flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 1


def _telling(inputs: Tensor) -> bool:
    """Whether there are several rows, all different."""
    rows = inputs.detach().flatten(1) if inputs.dim() > 1 else inputs.detach().unsqueeze(1)
    return len(rows) > 1 and len(torch.unique(rows, dim=0)) == len(rows)
