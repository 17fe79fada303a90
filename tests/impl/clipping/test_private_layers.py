"""Tied and reused parameters, and layers without a rule: whole private steps against autograd, one sample at a time.

All values are integers and every gradient is exact, so norms and gradients are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdpcheck.impl.clipping.batch_layout import REPLICATED
from fsdpcheck.impl.clipping.modes import Mode, parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.norms import fallback
from fsdpcheck.impl.norms._products import Products
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.sharding.fsdp2_model import PerParameterModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import each, every_pair

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

SIZES = {1: [4], 3: [3, 0, 1], 5: [1, 0, 2, 0, 1]}
"""Samples of each rank, by world size; four in all."""


def integers(*shape: int, seed: int, bound: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-bound, bound + 1, shape, generator=generator).double()


class Twice(nn.Module):
    """One layer, run twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())  # type: ignore[no-any-return]


class Scale(nn.Module):
    """A layer that no rule knows: x * weight + bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class OneAsTwo(nn.Module):
    """A layer that no rule knows and that holds one parameter under two names: x * weight + weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = self.weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Around(nn.Module):
    """Parameters held beside a layer that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.shift + self.shift  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two inputs, two outputs, of which the second is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(3, 3, 3)
        self.gate = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.bilinear(x, x.abs()) + self.gate, self.gate * x


class First(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0]


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with keys of zero, so that each position attends equally to all: softmax is exact.

    A head of 16 is the smallest whose scale, 1/4, has a dyadic root: torch multiplies queries and keys with that.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def tied_linears() -> nn.Sequential:
    """The weight in two units, so it belongs to the root; each layer's bias to its own unit."""
    built = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2))
    built.get_submodule("1.0").weight = built.get_submodule("0.0").weight
    return built


def tied_embedding() -> nn.Sequential:
    """An Embedding's weight is also the last Linear's, whose bias is its own; one unit."""
    unit = nn.Sequential(nn.Embedding(5, 3, padding_idx=0), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 5))
    unit[3].weight = unit[0].weight
    return nn.Sequential(unit)


def tied_with_fallback() -> nn.Sequential:
    """A weight [3] that a LayerNorm-free Scale and a second Scale share, and a third use of its bias."""
    built = nn.Sequential(nn.Sequential(Scale(3), nn.Linear(3, 3), Scale(3), Scale(3)))
    built.get_submodule("0.2").weight = built.get_submodule("0.0").weight
    built.get_submodule("0.3").bias = built.get_submodule("0.0").weight
    return built


MODELS: dict[str, tuple[Callable[[], nn.Sequential], str]] = {
    "tied linears": (tied_linears, "sequence"),
    "tied embedding": (tied_embedding, "tokens"),
    "linear twice": (lambda: nn.Sequential(Twice(nn.Linear(3, 3)), nn.Linear(3, 2)), "vector"),
    "conv twice": (lambda: nn.Sequential(Twice(nn.Conv1d(3, 3, 3, padding=1)), nn.Flatten()), "sequence"),
    "fallback": (lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3), Scale(3), nn.ReLU()), Scale(3)), "sequence"),
    "fallback is a unit": (lambda: nn.Sequential(Scale(3), nn.Sequential(nn.Linear(3, 3))), "vector"),
    "fallback twice": (lambda: nn.Sequential(Twice(Scale(3))), "vector"),
    "fallback, one as two": (lambda: nn.Sequential(OneAsTwo(3), nn.Linear(3, 2)), "vector"),
    "fallback, tied": (tied_with_fallback, "vector"),
    "around a rule": (lambda: nn.Sequential(Around(), nn.Linear(3, 2)), "sequence"),
    "two inputs and outputs": (lambda: nn.Sequential(Pair(), First(), nn.Linear(3, 2)), "vector"),
    "attention": (lambda: nn.Sequential(SelfAttention(), nn.ReLU()), "wide sequence"),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose1d(3, 2, 2), nn.Flatten()), "sequence"),
}
"""(how it is made, its input); every child with parameters is a sharding unit."""

INPUTS = {
    "vector": integers(4, 3, seed=20),
    "sequence": integers(4, 3, 3, seed=21),
    "wide sequence": integers(4, 2, 16, seed=22),
    "tokens": torch.tensor([[1, 1, 4], [0, 2, 2], [3, 0, 3], [4, 4, 4]]),
}


def made(kind: str) -> nn.Sequential:
    built = MODELS[kind][0]().double()
    for seed, (name, parameter) in enumerate(built.named_parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
        if "in_proj" in name:
            parameter.data[16:32] = 0
    if kind == "tied embedding":
        built.get_parameter("0.0.weight").data[0] = 0
    return built


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * outputs.flatten(1).square().sum(1)


def alone(kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Squared norms [4], and gradients of the sum, one sample at a time."""
    module, x = made(kind), INPUTS[MODELS[kind][1]]
    named = dict(module.named_parameters())
    squared, total = [], {name: torch.zeros_like(p) for name, p in named.items()}
    for i in range(len(x)):
        found = torch.autograd.grad(loss(module(x[i : i + 1]), x).sum(), list(named.values()))
        squared.append(sum(float(g.square().sum()) for g in found))
        for name, gradient in zip(named, found, strict=True):
            total[name] += gradient
    return torch.tensor(squared, dtype=torch.float64), total


def flat(module: nn.Module, units: list[str], reshard: bool) -> ShardedModel:
    return ShardedModel(module, units, collectives.axis(), reshard)


def per_parameter(module: nn.Module, units: list[str], reshard: bool) -> PerParameterModel:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return PerParameterModel(module, units, mesh, reshard)


WAYS: dict[str, Callable[[nn.Module, list[str], bool], Any]] = {"flat": flat, "per parameter": per_parameter}

UNTIED = ("tied linears", "per parameter")
"""``fully_shard`` would untie a weight that stands in two units; the model refuses it."""


def stepped(kind: str, way: str, rank: int, world_size: int, options: Options, reshard: bool) -> Trainer:
    module, x = made(kind), INPUTS[MODELS[kind][1]]
    units = [name for name, child in module.named_children() if any(True for _ in child.parameters())]
    trainer = Trainer(
        WAYS[way](module, units, reshard),
        lambda y, t: loss(y, t) * world_size,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0, foreach=False),
        options,
    )
    start = sum(SIZES[world_size][:rank])
    rows = list(range(4)) if options.layout == REPLICATED else list(range(start, start + SIZES[world_size][rank]))
    trainer.step([MicroBatch(x[rows], x[rows], rows)])
    return trainer


@every_pair(
    {
        "kind": MODELS,
        "way": WAYS,
        "timing, reshard": [("immediate", True), ("deferred", True), ("immediate", False)],
        "world_size": SIZES,
        "passes": ["two_pass", "bookkeeping"],
    },
    unless=lambda row: (row["kind"], row["way"]) == UNTIED,
)
def test_a_private_step_equals_the_single_device(
    ranks: Ranks, kind: str, way: str, timing: Any, reshard: bool, passes: Any, world_size: int
) -> None:
    options = Options(normaliser=1, privacy=Privacy(Flat(2.0**60), Mode(passes=passes, timing=timing)))
    squared, total = alone(kind)

    def body(rank: int) -> tuple[Tensor, list[int], dict[str, Tensor]]:
        trainer = stepped(kind, way, rank, world_size, options, reshard)
        return torch.cat(trainer.found.norms), trainer.found.indices, trainer.model.full_gradients()

    for found, indices, gradients in ranks(body, world_size):
        assert torch.equal(found, (squared[indices] * world_size**2).sqrt())
        for name, gradient in total.items():
            assert torch.equal(gradients[name], gradient * world_size), name


@pytest.mark.parametrize("mode", ["ghost", "flash", "ghost_bk", "flash_bk"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_attention_forms_no_gradient_of_a_sample(
    ranks: Ranks, way: str, mode: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms and clipped gradients through its projections: ways to per-sample gradients are closed."""

    def closed(*_: Any) -> Any:
        raise AssertionError("a per-sample gradient is formed")

    monkeypatch.setattr(Products, "per_sample_gradient", closed)
    monkeypatch.setattr(fallback, "gradients_of", closed)
    options = Options(normaliser=1, privacy=Privacy(Flat(2.0**60), parse(mode)))
    squared, total = alone("attention")

    def body(rank: int) -> tuple[Tensor, list[int], dict[str, Tensor]]:
        trainer = stepped("attention", way, rank, world_size, options, True)
        return torch.cat(trainer.found.norms), trainer.found.indices, trainer.model.full_gradients()

    for found, indices, gradients in ranks(body, world_size):
        assert torch.equal(found, (squared[indices] * world_size**2).sqrt())
        assert all(torch.equal(gradients[name], gradient * world_size) for name, gradient in total.items())


@each("contribution", ["partial", "mixed"])
@each("kind", ["tied linears", "tied embedding", "fallback, tied", "conv twice", "attention"])
def test_partial_contributions_of_shared_parameters(ranks: Ranks, kind: str, contribution: Any) -> None:
    options = Options(normaliser=1, privacy=Privacy(Flat(2.0**60), contribution=contribution), layout=REPLICATED)
    squared, _ = alone(kind)
    for found in ranks(lambda rank: torch.cat(stepped(kind, "flat", rank, 3, options, True).found.norms), 3):
        assert torch.equal(found, (squared * 9).sqrt())


def test_per_parameter_sharding_refuses_a_weight_in_two_units(ranks: Ranks) -> None:
    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"parameter 0.0.weight is used in 2 units .*put all of its uses into one"):
            per_parameter(tied_linears(), ["0", "1"], True)

    ranks(body, 2)
