"""How much is gathered at any moment of a private step, and that a step which raised leaves nothing behind.

With ``reshard_after_forward``, beside the root: one unit with flat buffers, and two at most with ``fully_shard``, which
gathers the next one ahead in backward. Without it, all of them after the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdpcheck.impl.clipping.modes import parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.costs import memory
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.protocol import Sharded
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.releases import with_a_way_back
from tests.common.tables import every_pair
from tests.impl.ways import WAYS, integers, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

UNITS = ["0", "1", "2", "3"]
MODES = ("ghost", "flash", "ghost_bk", "flash_bk")
STEPS = ("plain", *MODES)
X = integers(4, 3, seed=1)


def network() -> nn.Sequential:
    """Four units of different sizes, and a root."""
    widths = (3, 5, 7, 4, 6)
    units = [nn.Sequential(nn.Linear(d, p), nn.ReLU()) for d, p in pairwise(widths)]
    built = nn.Sequential(*units, nn.Linear(widths[-1], 1)).double()
    for seed, parameter in enumerate(built.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    return built


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.square().sum(1)


def gathered(model: Sharded) -> dict[str, int]:
    """Bytes of each unit's parameters that this rank holds whole now; "" is the root."""
    if isinstance(model, ShardedModel):
        held = {u.fqn: sum(b.full.untyped_storage().nbytes() for b in u.buffers) for u in model.units}
        return {name.replace("(root)", ""): size for name, size in held.items() if size}
    found: dict[str, int] = {}
    for name, parameter in model.module.named_parameters():
        if not isinstance(parameter, DTensor):
            unit = name[0] if name[0] in UNITS else ""
            found[unit] = found.get(unit, 0) + parameter.numel() * parameter.element_size()
    return found


def trainer_of(way: str, mode: str, reshard: bool, loss: Callable[..., Tensor] = loss) -> Trainer:
    options = Options(normaliser=2, privacy=None if mode == "plain" else Privacy(Flat(1.0), parse(mode)))
    return Trainer(WAYS[way](network(), UNITS, reshard), loss, sgd, options)


def watched(trainer: Trainer) -> list[dict[str, int]]:
    """What is gathered before and after every layer's forward and at every gradient of an output, from now on."""
    seen: list[dict[str, int]] = []

    def look(*_: Any) -> None:
        seen.append(gathered(trainer.model))

    def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look)  # type: ignore[no-untyped-call]

    for module in trainer.model.module.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(after)
    return seen


@every_pair({"mode": STEPS, "reshard": [True, False], "way": WAYS})
def test_no_more_units_are_gathered_than_promised(ranks: Ranks, way: str, reshard: bool, mode: str) -> None:
    def most(rank: int) -> tuple[int, int]:
        trainer = trainer_of(way, mode, reshard)
        seen = watched(trainer)
        for _ in range(2):
            trainer.step([MicroBatch(X[rank : rank + 1], X[rank : rank + 1], [rank])])
            assert gathered(trainer.model) == {}
        return max(len([u for u in now if u]) for now in seen), max(sum(now.values()) for now in seen)

    account = memory.flat_account if way == "flat" else memory.per_parameter_account
    peak = account(network(), UNITS, 3, reshard_after_forward=reshard).peak_unsharded
    for units, size in ranks(most, 3):
        hidden = reshard and way == "per-parameter"  # fully_shard shows what it has gathered ahead only when it is used
        assert units == (1 if reshard else len(UNITS))
        assert size <= peak if hidden else size == peak


@pytest.mark.parametrize("way", WAYS)
def test_units_that_are_never_freed_would_be_seen(ranks: Ranks, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: units are kept after forward though they should not be."""
    kept = WAYS[way]

    def forgetful(module: nn.Module, units: list[str], reshard: bool) -> Sharded:
        return kept(module, units, False)

    monkeypatch.setitem(WAYS, way, forgetful)

    def most(rank: int) -> int:
        trainer = trainer_of(way, "ghost", True)
        seen = watched(trainer)
        trainer.step([MicroBatch(X[rank : rank + 1], X[rank : rank + 1], [rank])])
        return max(len([unit for unit in now if unit]) for now in seen)

    assert ranks(most, 3) == [len(UNITS)] * 3


# -- a step that raised ------------------------------------------------------------------------------------------------


class Stumbling:
    """Raises in the forward, in the loss or in the backward, while it is on; on rank 0 another error than elsewhere."""

    def __init__(self, where: str, rank: int) -> None:
        self.where, self.on = where, True
        self.error: Exception = KeyError("on purpose") if rank else ConnectionError("a peer is gone")

    def stumble(self, here: str) -> None:
        if self.on and self.where == here:
            raise self.error

    def forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.stumble("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: self.stumble("backward"))  # type: ignore[no-untyped-call]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.stumble("loss")
        return loss(outputs, targets)


@every_pair({"mode": MODES, "where": ["forward", "loss", "backward"], "way": with_a_way_back(WAYS)})
def test_a_step_that_raised_leaves_nothing_and_the_next_one_is_clean(
    ranks: Ranks, way: str, mode: str, where: str
) -> None:
    """In the first step, which also asks whether samples mix, and in a later one; errors differ from rank to rank."""

    def run(rank: int, stumbles: bool) -> dict[str, Tensor]:
        stumbling = Stumbling(where, rank)
        stumbling.on = False
        trainer = trainer_of(way, mode, True, stumbling.loss)
        trainer.model.module[2].register_forward_hook(stumbling.forward)  # type: ignore[index, operator]
        assert trainer.private is not None
        batch = [MicroBatch(X[rank : rank + 1], X[rank : rank + 1], [rank])]
        for _ in range(2):
            if stumbles:
                stumbling.on = True
                with pytest.raises(type(stumbling.error)) as caught:
                    trainer.step(batch)
                stumbling.on = False
                assert f"on rank {rank} of 2" in caught.value.__notes__
                assert gathered(trainer.model) == {}
                assert all(shard.grad is None for shard in trainer.model.shards())
                assert (trainer.private.recorder.records, trainer.private.recorder.kept) == ([], [])
            trainer.step(batch)
        return trainer.model.full_values()

    wanted, got = ranks(lambda rank: run(rank, False), 2), ranks(lambda rank: run(rank, True), 2)
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
