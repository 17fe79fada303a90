"""Mixed precision, meta-device construction, activation checkpointing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.releases import with_a_way_back
from tests.common.tables import each
from tests.impl.network import BOOKKEEPING, X, Y, loss, network, per_sample, squared_norm
from tests.impl.ways import WAYS, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks


def on_ranks(ranks: Ranks, way: str, world_size: int, make: Any, privacy: Privacy | None, **more: Any) -> list[Any]:
    """Gradients times W, norms and parameters of one step of ``make()`` on every rank's share of X."""

    def run(rank: int) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        rows = [row for row in range(len(X)) if row % world_size == rank]
        options = Options(normaliser=world_size, privacy=privacy)
        trainer = Trainer(WAYS[way](make(), ["0", "1"], True, **more), loss, sgd, options)
        assert all(shard.dtype == torch.float64 for shard in trainer.model.shards())
        trainer.step([MicroBatch(X[rows], Y[rows], rows)])
        norms = torch.cat(trainer.found.norms) if privacy else torch.empty(0)
        return trainer.model.full_gradients(), norms, trainer.model.full_values()

    return ranks(run, world_size)


class Casting(nn.Module):
    """Inputs of dtype ``whole`` to bfloat16, outputs back to it."""

    def __init__(self, whole: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16 if x.dtype == self.whole else self.whole)


def casting() -> nn.Sequential:
    layers = list(network())
    return nn.Sequential(nn.Sequential(Casting(), *layers[0]), nn.Sequential(*layers[1], Casting()))


@each("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
@each("world_size", [1, 2, 3])
@each("way", WAYS)
def test_computing_in_bfloat16_on_small_integers_is_exact(ranks: Ranks, way: str, world_size: int, mode: Mode) -> None:
    """Values of these networks fit 8 bits, so every rounding that is wanted is none: the float64 answer comes out."""
    samples = per_sample(network(), X, Y)
    norms = torch.tensor([squared_norm(g, "") for g in samples], dtype=torch.float64).sqrt()
    privacy = Privacy(Flat(2.0**40), mode)
    found = on_ranks(ranks, way, world_size, casting, privacy, compute_dtype=torch.bfloat16)
    for rank, (gradients, got, values) in enumerate(found):
        assert torch.equal(got, norms[[row for row in range(len(X)) if row % world_size == rank]])
        assert {value.dtype for value in values.values()} == {torch.float64}
        for name, gradient in gradients.items():
            layer, index, parameter = name.split(".")
            plain = f"{layer}.{int(index) - (layer == '0')}.{parameter}"
            assert torch.equal(gradient * world_size, sum(g[plain] for g in samples))  # type: ignore[arg-type]


@each("mode", [None, Mode(), BOOKKEEPING], ids=["plain", "two_pass", "bookkeeping"])
@each("sync_every", [True, False])
@each("way", with_a_way_back(WAYS))
def test_micro_batches_are_added_up_in_the_parameters_precision(
    ranks: Ranks, way: str, sync_every: bool, mode: Mode | None
) -> None:
    """Gradients 256, 1 and 1: in bfloat16 their sum is 256. What a step that raised has added up is not added again."""
    privacy = None if mode is None else Privacy(Flat(2.0**40), mode)
    micro_batches = [MicroBatch(torch.tensor([[x]]), torch.ones(1, 1), [i]) for i, x in enumerate((256.0, 1.0, 1.0))]

    def interrupt(moment: str) -> None:
        if "interrupt" in passed and moment == "after_reshard":
            passed.append(moment)
            if passed.count("after_reshard") == 2:
                raise KeyboardInterrupt

    passed: list[str] = []

    def run(rank: int) -> float:
        module = nn.Sequential(Casting(torch.float32), nn.Linear(1, 1, bias=False), Casting(torch.float32))
        nn.init.zeros_(module[1].weight)
        model = WAYS[way](module, [], True, compute_dtype=torch.bfloat16)
        options = Options(normaliser=1.0, privacy=privacy, sync_every=sync_every)
        trainer = Trainer(model, lambda outputs, y: (outputs * y).sum(1), sgd, options, notify=interrupt)
        trainer.step(micro_batches)
        assert model.full_gradients()["1.weight"].item() == 258
        passed.append("interrupt")
        with pytest.raises(KeyboardInterrupt):
            trainer.step(micro_batches)
        if way == "per-parameter" and not sync_every and mode != BOOKKEEPING:
            with pytest.raises(RuntimeError, match="added up in mixed precision"):
                trainer.step(micro_batches)
            return 258.0
        trainer.step(micro_batches)
        return model.full_gradients()["1.weight"].item()

    assert ranks(run, 1) == [258.0]


def test_norms_are_not_squared_in_half_precision(ranks: Ranks) -> None:
    """17^2 takes nine bits, one more than bfloat16 has: it and the sum of two of them are formed in float32."""
    x = torch.full((1, 2), 16.0).double()

    def norm(rank: int) -> float:
        module = nn.Sequential(Casting(), nn.Linear(2, 1, bias=False).double(), Casting())
        module[1].get_parameter("weight").data.fill_(1)
        model = WAYS["flat"](module, [], True, compute_dtype=torch.bfloat16)
        trainer = Trainer(model, lambda y, t: y.sum(1) * 1.0, sgd, Options(normaliser=1, privacy=Privacy(Flat(1.0))))
        trainer.step([MicroBatch(torch.cat([x, x + 1]), X[:2], [0, 1])])
        return float(trainer.found.norms[0][1])

    assert ranks(norm, 1) == [math.sqrt(2 * 17.0**2)]


def test_losses_in_half_precision_are_refused(ranks: Ranks) -> None:
    def refused(rank: int) -> str:
        model = WAYS["flat"](network().bfloat16(), [], True)
        trainer = Trainer(model, loss, sgd, Options(normaliser=1, privacy=Privacy(Flat(1.0))))
        with pytest.raises(TypeError, match=r"losses in torch\.bfloat16.*cast to float32") as caught:
            trainer.step([MicroBatch(X.bfloat16(), Y.bfloat16(), [0, 1, 2, 3])])
        return str(caught.value)

    assert ranks(refused, 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_on_the_meta_device_is_given_its_values_by_name(ranks: Ranks, way: str, world_size: int) -> None:
    real = {name: parameter.detach() for name, parameter in network().named_parameters()}

    def meta() -> nn.Module:
        return network().to("meta")

    privacy = Privacy(Flat(2.0**40))
    wanted = on_ranks(ranks, way, world_size, network, privacy)
    got = on_ranks(ranks, way, world_size, meta, privacy, initial=lambda name, shape: real[name].clone())
    for one, other in zip(got, wanted, strict=True):
        assert all(torch.equal(one[2][name], other[2][name]) for name in real)


@pytest.mark.parametrize("way", WAYS)
def test_values_of_a_meta_model_are_asked_for(ranks: Ranks, way: str) -> None:
    def refused(rank: int) -> tuple[str, str]:
        with pytest.raises(ValueError, match=r"\.weight is on the meta device: give its values") as missing:
            WAYS[way](network().to("meta"), ["0", "1"], True)
        with pytest.raises(ValueError, match=r"gave \(1,\), wanted \(") as wrong:
            WAYS[way](network().to("meta"), ["0", "1"], True, initial=lambda name, shape: torch.ones(1))
        return str(missing.value), str(wrong.value)

    assert len(ranks(refused, 2)) == 2


class Checkpointed(nn.Module):
    """Recomputes ``inner`` in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize("privacy", [None, Privacy(Flat(1.0)), Privacy(Flat(1.0), BOOKKEEPING)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_activation_checkpointing_changes_no_bit(ranks: Ranks, way: str, privacy: Privacy | None) -> None:
    def recomputing() -> nn.Sequential:
        return nn.Sequential(*(Checkpointed(layer) for layer in network()))

    wanted, got = (on_ranks(ranks, way, 2, make, privacy) for make in (network, recomputing))
    for (gradients, norms, _), (other, other_norms, _) in zip(got, wanted, strict=True):
        assert torch.equal(norms, other_norms)
        assert all(torch.equal(gradients[name.replace(".", ".inner.", 1)], other[name]) for name in other)


@pytest.mark.parametrize("mode", [Mode(), BOOKKEEPING], ids=["two_pass", "bookkeeping"])
@pytest.mark.parametrize("way", WAYS)
def test_recomputed_forwards_are_none_of_the_next_micro_batch(ranks: Ranks, way: str, mode: Mode) -> None:
    """Micro-batches of one and three samples: what the backward of the first one recomputes has one row."""

    def run(rank: int) -> dict[str, Tensor]:
        recomputing = nn.Sequential(*(Checkpointed(layer) for layer in network()))
        options = Options(normaliser=1, privacy=Privacy(Flat(2.0**40), mode))
        trainer = Trainer(WAYS[way](recomputing, ["0", "1"], True), loss, sgd, options)
        trainer.step([MicroBatch(X[rows], Y[rows], rows) for rows in ([0], [1, 2, 3])])
        return trainer.model.full_gradients()

    samples = per_sample(network(), X, Y)
    (got,) = ranks(run, 1)
    for name, gradient in got.items():
        assert torch.equal(gradient, sum(g[name.replace(".inner.", ".", 1)] for g in samples))  # type: ignore[arg-type]
