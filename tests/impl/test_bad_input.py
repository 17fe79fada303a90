"""Bad input of private training, on both ways of sharding, alone and on ranks: what is wrong, where, and the way out.

Every error is raised on every rank, names its module and the rank, and leaves nothing gathered and no gradient behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpcheck.impl.clipping import independence
from fsdpcheck.impl.clipping.modes import parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import each
from tests.impl.network import X, Y, loss, network
from tests.impl.ways import WAYS, integers, sgd

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

WORLDS = (1, 3)
SEQUENCE = integers(4, 5, 3, seed=3)
TOKENS = torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0]])


class Calls(nn.Module):
    """Layers by name, and any forward with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.told = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.told(self, x)


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3))


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.flatten(1).sum(1)


def step(
    way: str, module: nn.Module, rank: int, world_size: int, loss: Any = total, x: Tensor = X, **more: Any
) -> Trainer:
    """A trainer that has tried a private step; the first child is a unit."""
    options = Options(normaliser=2, privacy=Privacy(Flat(1.0), **more))
    trainer = Trainer(WAYS[way](module.double(), [next(module.named_children())[0]], True), loss, sgd, options)
    rows = [row for row in range(len(x)) if row % world_size == rank and row < 2]  # the last rank of three has none
    trainer.step([MicroBatch(x[rows], x[rows], rows)])
    return trainer


Bad = tuple[Callable[[], nn.Module], Any, Tensor, str]
BAD: dict[str, Bad] = {
    "batch norm": (
        lambda: nn.Sequential(linear(), nn.BatchNorm1d(3)),
        total,
        X,
        "1 is a BatchNorm1d: it mixes the samples.*use GroupNorm",
    ),
    "a layer without parameters that mixes": (
        lambda: nn.Sequential(linear(), Calls(lambda m, x: x - x.mean(0)), linear()),
        total,
        X,
        "1 is a Calls: it mixes the samples of a batch; take GroupNorm",
    ),
    "a forward that mixes": (
        lambda: Calls(lambda m, x: m.b(m.a(x).softmax(0)), a=linear(), b=linear()),
        total,
        X,
        "the forward that calls b, before it does: it mixes the samples",
    ),
    "rows of tokens that mix": (
        lambda: Calls(lambda m, x: m.b(m.a(x).flip(0)), a=nn.Embedding(3, 3), b=linear()),
        total,
        TOKENS,
        "the forward that calls b, before it does: it mixes the samples",
    ),
    "a loss that compares samples": (
        linear,
        lambda y, t: (y - y.mean(0)).square().sum(1),
        X,
        "the loss: it mixes the samples .*a loss that compares no samples",
    ),
    "a mean that is spread out": (
        linear,
        lambda y, t: y.mean().expand(len(y)),
        X,
        "the loss: it mixes the samples",
    ),
    "a loss with the reduction mean": (
        linear,
        lambda y, t: y.mean(),
        X,
        r"got losses of shape \(\) for .* samples.*reduction='none'.*Options.normaliser",
    ),
    "a loss with the reduction sum": (linear, lambda y, t: y.sum(), X, "give the loss reduction='none'"),
    "a loss a token": (linear, lambda y, t: y.sum(2), SEQUENCE, "sum over all other axes"),
    "positions first": (
        lambda: Calls(lambda m, x: m.b(m.a(x).transpose(0, 1)).transpose(0, 1), a=linear(), b=nn.Linear(3, 3)),
        total,
        SEQUENCE,
        "b gives 5 rows for 2 samples: the first axis .*batch_first=True",
    ),
    "as many positions as samples, first": (
        lambda: Calls(lambda m, x: m.b(m.a(x).transpose(0, 1)).transpose(0, 1), a=linear(), b=nn.Linear(3, 3)),
        total,
        SEQUENCE[:, :2],
        "b gives 2 rows for 4 samples",
    ),
    "attention, positions first": (
        lambda: Calls(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(3, 1)),
        total,
        SEQUENCE,
        "a: its first axis is positions, not samples: use batch_first=True",
    ),
    "a tensor by keyword": (
        lambda: Calls(lambda m, x: m.b(input=m.a(x)), a=linear(), b=nn.Linear(3, 3)),
        total,
        X,
        r"b was called with tensors by keyword, \['input'\]: pass them by position",
    ),
}
"""(model, loss, inputs, what the error says)."""


@each("world_size", WORLDS)
@pytest.mark.parametrize("way", WAYS)
@each("what", BAD)
def test_bad_input_is_refused_on_every_rank(ranks: Ranks, what: str, way: str, world_size: int) -> None:
    make, loss, x, message = BAD[what]

    def refused(rank: int) -> str:
        with pytest.raises((NotImplementedError, ValueError), match=f"(?s){message}") as caught:
            step(way, make(), rank, world_size, loss, x)
        assert f"on rank {rank} of {world_size}" in caught.value.__notes__
        return "refused"

    assert ranks(refused, world_size) == ["refused"] * world_size


# -- parameters changed after wrapping ---------------------------------------------------------------------------------


def replace(module: nn.Sequential) -> None:
    module[1][0].weight = nn.Parameter(torch.zeros(2, 4).double())  # type: ignore[index, assignment]


def remove(module: nn.Sequential) -> None:
    module[1][0].bias = None  # type: ignore[index, assignment]


def add_layer(module: nn.Sequential) -> None:
    module.append(nn.Linear(2, 2).double())


def replace_layer(module: nn.Sequential) -> None:
    module[1] = nn.Sequential(nn.Linear(4, 2).double())


def freeze(module: nn.Sequential) -> None:
    module[1][0].weight.requires_grad_(False)  # type: ignore[index, union-attr]


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "replaced": (replace, "parameter 1.0.weight was replaced after sharding: change it before wrapping"),
    "removed": (remove, "parameter 1.0.bias was replaced after sharding"),
    "a layer more": (add_layer, "parameter 2.weight was added after sharding: build the whole module before"),
    "another layer": (replace_layer, "parameter 1.0.weight was added after sharding"),
    "frozen": (freeze, "requires_grad of 1.0.weight was True .*unfreeze before wrapping"),
    "all frozen": (lambda module: module.requires_grad_(False), "requires_grad of 0.0.weight was True"),
    "dtype": (lambda module: module.float(), "parameter 0.0.weight was torch.float64 .*compute_dtype"),
}


@each("private", [True, False])
@each("world_size", WORLDS)
@pytest.mark.parametrize("way", WAYS)
@each("what", CHANGES)
def test_a_parameter_changed_after_wrapping_is_named(
    ranks: Ranks, what: str, way: str, world_size: int, private: bool
) -> None:
    change, message = CHANGES[what]

    def refused(rank: int) -> str:
        module = network()
        options = Options(normaliser=2, privacy=Privacy(Flat(1.0)) if private else None)
        trainer = Trainer(WAYS[way](module, ["0", "1"], True), loss, sgd, options)
        batch = [MicroBatch(X[[rank]], Y[[rank]], [rank])]
        trainer.step(batch)
        change(module)
        with pytest.raises(RuntimeError, match=message) as caught:
            trainer.step(batch)
        assert f"on rank {rank} of {world_size}" in caught.value.__notes__
        return "refused"

    assert ranks(refused, world_size) == ["refused"] * world_size


@pytest.mark.parametrize("way", WAYS)
@each("flag", [False, True])
def test_a_parameter_frozen_or_thawed_while_it_is_gathered_is_named(ranks: Ranks, way: str, flag: bool) -> None:
    def refused(rank: int) -> str:
        module = network()
        module[1][0].weight.requires_grad_(not flag)
        trainer = Trainer(WAYS[way](module, ["0", "1"], False), loss, sgd, Options(normaliser=2))
        with torch.no_grad():
            trainer.model(X[[rank]])
        module[1][0].weight.requires_grad_(flag)
        with pytest.raises(RuntimeError, match=f"requires_grad of 1.0.weight was {not flag} .*is now {flag}"):
            trainer.step([MicroBatch(X[[rank]], Y[[rank]], [rank])])
        return "refused"

    assert ranks(refused, 2) == ["refused"] * 2


# -- whether samples mix -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_asking_changes_no_bit_and_no_buffer(ranks: Ranks, way: str, world_size: int, mode: str) -> None:
    """Dropout draws what it would have drawn, and a counter of forwards counts none of the made-up ones."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x

    def run(rank: int, answer: str) -> tuple[dict[str, Tensor], float]:
        torch.manual_seed(rank)
        module = nn.Sequential(*network(), nn.Dropout(0.5), Counting())
        options = Options(2, privacy=Privacy(Flat(1.0), parse(mode), independence=answer))  # type: ignore[arg-type]
        trainer = Trainer(WAYS[way](module, ["0", "1"], True), loss, sgd, options)
        trainer.step([MicroBatch(X[rank::world_size], Y[rank::world_size], range(rank, 4, world_size))])
        return trainer.model.full_values(), float(module[3].get_buffer("seen"))

    asked = ranks(lambda rank: run(rank, "ask"), world_size)
    trusted = ranks(lambda rank: run(rank, "trust"), world_size)
    for (one, count), (other, other_count) in zip(asked, trusted, strict=True):
        assert count == other_count == 1
        assert all(torch.equal(one[name], value) for name, value in other.items())


def test_who_knows_better_is_not_asked(ranks: Ranks) -> None:
    """Samples that mix behind a mask: NaN passes, numbers do not."""

    def masked(m: Any, x: Tensor) -> Tensor:
        found: Tensor = m.a(torch.eye(len(x)).double() @ x)
        return found

    def run(rank: int) -> str:
        with pytest.raises(NotImplementedError, match="independence='trust'"):
            step("flat", Calls(masked, a=linear()), rank, 1)
        step("flat", Calls(masked, a=linear()), rank, 1, independence="trust")
        return "trusted"

    assert ranks(run, 1) == ["trusted"]


def test_a_model_that_cannot_run_on_made_up_rows_says_so(ranks: Ranks) -> None:
    def picky(m: Any, x: Tensor) -> Tensor:
        if bool((x == 0).all()):
            raise ValueError("an empty sentence")
        found: Tensor = m.a(x)
        return found

    def run(rank: int) -> str:
        with pytest.raises(ValueError, match="an empty sentence") as caught:
            step("flat", Calls(picky, a=nn.Embedding(3, 3)), rank, 1, x=TOKENS)
        return caught.value.__notes__[0]

    assert "made-up rows of shape (2,) before the first private step" in ranks(run, 1)[0]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2), (2, 3, 4), (0, 3), ()])
def test_made_up_rows_cannot_be_taken_for_another_axis(shape: tuple[int, ...]) -> None:
    every = [rows for pair in independence.made_up(torch.zeros(0, *shape)) for rows in pair]
    assert len({len(rows) for rows in every}) == 4
    for rows in every:
        assert rows.shape[1:] == shape
        assert len(rows) not in shape
        assert bool((rows == rows[0]).all())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("units", [["0"], []], ids=["its unit is named", "its unit is not named"])
@pytest.mark.parametrize("left_out", [True, False], ids=["one ignored", "none ignored"])
def test_a_model_that_is_sharded_already_is_refused(ranks: Ranks, way: str, units: list[str], left_out: bool) -> None:
    """Not trained with a parameter that ``fully_shard`` was to ignore: its gradients would stay each rank's own."""

    def refused(rank: int) -> str:
        module, mesh = network(), init_device_mesh("cpu", (2,))
        ignored = {next(module.parameters())} if left_out else set()
        fully_shard(module[0], mesh=mesh, ignored_params=ignored)
        with pytest.raises(
            ValueError, match=r"module 0 is sharded already.*by PerParameterModel\(\.\.\., ignored="
        ) as told:
            WAYS[way](module, units, True)
        return str(told.value)

    assert len(set(ranks(refused, 2))) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_model_of_dtensors_is_refused(ranks: Ranks, way: str) -> None:
    def refused(rank: int) -> None:
        module, mesh = nn.Linear(2, 2), init_device_mesh("cpu", (2,))
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="parameter weight is a DTensor already"):
            WAYS[way](module, [], True)

    ranks(refused, 2)
