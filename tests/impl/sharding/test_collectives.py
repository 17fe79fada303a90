"""Collectives of a step by formula: U inner units and the root, K micro-batches, ways, modes and the reshard flag.

Per micro-batch, plain: U + 1 all-gathers forward, and U more backward if units are freed after forward (never the
root). Reductions: one a unit, at the last micro-batch. A private step adds: U all-gathers a micro-batch for a second
backward, none with bookkeeping; nothing for complete norms, one all-reduce a micro-batch for partial ones, or one in
all when fused; and one all-gather of two integers a step, so that all ranks learn of samples without a finite norm.
The first private step asks whether samples mix: two forwards more, once, unless the owner says that they do not.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck.impl.clipping.batch_layout import DISTRIBUTED, REPLICATED
from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import every_pair
from tests.impl.ways import WAYS, integers, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

X, Y = integers(4, 3, seed=1), integers(4, 2, seed=2)
BOOKKEEPING = Mode(passes="bookkeeping")
privacy = partial(Privacy, Flat(1.0), independence="trust")  # to ask takes two forwards, once
PRIVACY = {
    "plain": None,
    "two_pass": privacy(),
    "bookkeeping": privacy(BOOKKEEPING),
    "partial": privacy(contribution="partial"),
    "partial bookkeeping": privacy(BOOKKEEPING, contribution="partial"),
    "fused": privacy(BOOKKEEPING, contribution="partial", fuse_norms=True),
    "asked": privacy(independence="ask"),
}


def wanted(kind: str, reshard: bool, units: int, micro_batches: int) -> dict[str, int]:
    """The formula."""
    again = units if reshard else 0
    gathers = micro_batches * (units + 1 + again)
    private = kind != "plain"
    if private and "bookkeeping" not in kind and kind != "fused":
        gathers += micro_batches * again
    gathers += 2 * (units + 1) if kind == "asked" else 0
    reduces = {"partial": micro_batches, "partial bookkeeping": micro_batches, "fused": 1}.get(kind, 0)
    found = {"all_gather": gathers + private, "reduce_scatter": units + 1, "all_reduce": reduces}
    return {op: count for op, count in found.items() if count}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (outputs - targets).square().sum(1)


def trained(way: str, reshard: bool, kind: str, units: int, micro_batches: int) -> Trainer:
    """A trainer after one step on the whole batch, dealt out to micro-batches."""
    inner = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(units)]
    module = nn.Sequential(*inner, nn.Linear(3, 2)).double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    replicated = "partial" in kind or kind == "fused"
    options = Options(
        normaliser=2, privacy=PRIVACY[kind], layout=REPLICATED if replicated else DISTRIBUTED, sync_every=False
    )
    model = WAYS[way](module, [str(unit) for unit in range(units)], reshard)
    trainer = Trainer(model, loss, sgd, options)
    rows = [list(range(4))[k::micro_batches] for k in range(micro_batches)]
    trainer.step([MicroBatch(X[own], Y[own], own) for own in rows])
    return trainer


@every_pair({"kind": PRIVACY, "units, micro_batches": [(1, 1), (2, 2), (3, 2)], "way": WAYS, "reshard": [True, False]})
def test_collectives_are_as_many_as_the_formula_says(
    ranks: Ranks, way: str, reshard: bool, kind: str, units: int, micro_batches: int
) -> None:
    ranks(lambda rank: trained(way, reshard, kind, units, micro_batches) and None, 2)
    counted = [Counter(op for op, _ in ranks.trace(rank)) for rank in range(2)]
    assert counted == [wanted(kind, reshard, units, micro_batches)] * 2


@pytest.mark.parametrize("way", WAYS)
def test_fused_norms_change_no_bit(ranks: Ranks, way: str) -> None:
    def found(kind: str) -> list[Any]:
        def run(rank: int) -> tuple[Tensor, dict[str, Tensor], list[int]]:
            trainer = trained(way, True, kind, 2, 2)
            return torch.cat(trainer.found.norms), trainer.model.full_values(), trainer.found.indices

        return ranks(run, 2)

    for (norms, values, indices), (other, other_values, other_indices) in zip(
        found("fused"), found("partial"), strict=True
    ):
        assert torch.equal(norms, other)
        assert indices == other_indices
        assert all(torch.equal(values[name], other_values[name]) for name in values)


def test_numbers_sent_in_a_plain_flat_step(ranks: Ranks) -> None:
    """What a rank gives: two units of 12 numbers and a root of 8, W = 2; shards are gathered, wholes are reduced."""
    ranks(lambda rank: trained("flat", True, "plain", 2, 1), 2)
    assert ranks.execution is not None
    calls = ranks.execution.ranks[0].trace
    sent = Counter(call.op for call in calls for dtype, (numel,) in call.inputs for _ in range(numel))
    assert sent == {"all_gather": 2 * 2 * 6 + 4, "reduce_scatter": 2 * 12 + 8}


def test_fusing_needs_bookkeeping_and_one_reduction(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"fuse_norms in two passes.*ghost_bk"):
        Privacy(Flat(1.0), fuse_norms=True).mode_in_force()

    def refused(rank: int) -> str:
        options = Options(normaliser=2, privacy=PRIVACY["fused"], layout=REPLICATED)
        with pytest.raises(ValueError, match="sync_every=False") as caught:
            Trainer(WAYS["flat"](nn.Linear(3, 2).double(), [], True), loss, sgd, options)
        return str(caught.value)

    assert ranks(refused, 1)
