"""What private training refuses, by name and with the way out: everything that would train without counting rightly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdpcheck.impl.clipping import independence
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer

if TYPE_CHECKING:
    from tests.impl.conftest import Ranks

PRIVATE = Options(normaliser=1, privacy=Privacy(Flat(1.0)))


class Forward(nn.Module):
    """A weight [3] and a few layers, and any forward with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.told = forward

    def forward(self, x: Tensor) -> Any:
        return self.told(self, x)


class Parts(nn.Module):
    """No parameter of its own: an Embedding and a Linear of one shape, an attention, bags, and any forward."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.told = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.told(self, x)


def first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs  # type: ignore[no-any-return]


def private(
    module: nn.Module,
    units: tuple[str, ...] = (),
    loss: Callable[..., Tensor] = lambda y, t: first(y).flatten(1).sum(1),
) -> Trainer:
    sharded = ShardedModel(module, units, Axis(None, 0, 1), True)
    return Trainer(
        sharded, loss, lambda p: torch.optim.SGD(p, lr=1.0), Options(normaliser=1, privacy=Privacy(Flat(1.0)))
    )


def step(trainer: Trainer, x: Tensor | None = None) -> None:
    x = torch.tensor([[1.0, 2, 3], [3, 1, 2]]) if x is None else x
    trainer.step([MicroBatch(x, x, range(len(x)))])


TOKENS = torch.tensor([[0, 1, 1], [2, 0, 1]])
MASK = torch.zeros(2, 3, 3)
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mixes": (lambda: Forward(lambda m, x: (x - x.mean(0)) * m.weight), "is a Forward: it mixes the samples"),
    "mixes elsewhere": (lambda: Forward(lambda m, x: x.roll(1, 0) * m.weight), "is a Forward: it mixes the samples"),
    "random": (lambda: Forward(lambda m, x: F.dropout(x * m.weight)), "random in training mode needs its dropout at 0"),
    "a dict": (lambda: Forward(lambda m, x: {"y": x * m.weight}), "its output is a dict"),
    "rows": (
        lambda: Parts(lambda m, x: x + m.scale(torch.ones(1, 3)), scale=nn.Linear(3, 3)),
        "scale gives 1 rows for 2 samples: the first axis .* give it one row a sample",
    ),
    "keyword": (
        lambda: Parts(lambda m, x: m.linear(input=x), linear=nn.Linear(3, 3)),
        r"linear was called with tensors by keyword, \['input'\]: pass them by position",
    ),
    "weight used elsewhere": (
        lambda: Parts(lambda m, x: F.linear(m.linear(x), m.linear.weight), linear=nn.Linear(3, 3)),
        "parameter linear.weight is used outside the forward of the layer that holds it",
    ),
    "layer that never runs": (
        lambda: Parts(lambda m, x: F.linear(x, m.linear.weight), linear=nn.Linear(3, 3, bias=False)),
        "parameter linear.weight is used outside .*call the layer",
    ),
    "mask of each sample": (
        lambda: Parts(
            lambda m, x: m.a(*[x[..., None]] * 3, attn_mask=MASK)[0], a=nn.MultiheadAttention(1, 1, batch_first=True)
        ),
        "a mask for each sample",
    ),
    "further output": (
        lambda: Parts(lambda m, x: m.a(*[x[..., None]] * 3)[1], a=nn.MultiheadAttention(1, 1, batch_first=True)),
        "the loss depends on a further output of a, after its first",
    ),
    "last state of an LSTM": (
        lambda: Parts(lambda m, x: m.a(x[..., None])[1][0][-1], a=nn.LSTM(1, 2, batch_first=True)),
        "the loss depends on a further output of a, after its first",
    ),
    "recomputed in its backward": (
        lambda: Parts(
            lambda m, x: checkpoint(m.a, x.clone().requires_grad_(), use_reentrant=True),
            a=nn.Sequential(nn.Linear(3, 3)),
        ),
        "torch.utils.checkpoint with use_reentrant=True: .*never clipped; say use_reentrant=False",
    ),
    "further output in a dict": (
        lambda: Parts(
            lambda m, x: m.a(x)[1]["inner"], a=Forward(lambda m, x: (lambda y: (2 * y, {"inner": y}))(x * m.weight))
        ),
        "the loss depends on a further output of a, after its first",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_refuses(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        step(private(make()))


@pytest.mark.parametrize("more", [{"offsets": torch.tensor([0, 1])}, {"per_sample_weights": torch.ones(2, 3)}])
@pytest.mark.parametrize("position", [True, False])
def test_bags_by_offsets_or_with_weights_are_refused(more: dict[str, Tensor], position: bool) -> None:
    (name, value), *_ = more.items()

    def forward(m: Any, x: Tensor) -> Tensor:
        tokens = x.flatten() if name == "offsets" else x
        between = (None,) if name == "per_sample_weights" else ()
        found: Tensor = m.bag(tokens, *between, value) if position else m.bag(tokens, **more)
        return found

    with pytest.raises(NotImplementedError, match=r"knows one input .*offsets|with tensors by keyword"):
        step(private(Parts(forward, bag=nn.EmbeddingBag(3, 2, mode="sum"))), TOKENS)


class Held(nn.Module):
    """A parameter beside two layers that are sharding units."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(3))
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.shift)  # type: ignore[no-any-return]


def one_as_two(layer: nn.Module, first: str, second: str) -> nn.Module:
    """A layer that holds one parameter under two names: its gradient is the sum of both, with cross terms."""
    layer.register_parameter(second, layer.get_parameter(first))
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("make", "units", "message"),
    [
        (
            lambda: one_as_two(nn.LayerNorm(3), "weight", "bias"),
            (),
            "0: weight and bias are one parameter, and the norm rule of LayerNorm .*give each a parameter of its own",
        ),
        (
            lambda: one_as_two(nn.MultiheadAttention(3, 1, vdim=2, batch_first=True), "q_proj_weight", "k_proj_weight"),
            (),
            "0: q_proj_weight and k_proj_weight are one parameter, and the norm rule of MultiheadAttention",
        ),
        (Held, ("layers.0", "layers.1"), r"\(root\) is a Held .*layers.0, layers.1 in it .*a module of their own"),
        (lambda: nn.MultiheadAttention(2, 1), (), "its first axis is positions, not samples: use batch_first=True"),
        (lambda: nn.MultiheadAttention(2, 1, 0.5, batch_first=True), (), "random in training mode"),
        (lambda: nn.Sequential(nn.LSTM(2, 2, 2, dropout=0.5)), (), "0: it is random in training mode"),
    ],
)
def test_a_trainer_refuses(make: Callable[[], nn.Module], units: tuple[str, ...], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        private(make(), units)


def test_a_parameter_beside_units_that_are_not_sharded_apart_is_covered() -> None:
    step(private(Held()))


def test_dropout_that_is_off_is_no_reason() -> None:
    step(private(nn.Sequential(Forward(lambda m, x: F.dropout(x * m.weight, training=m.training))).eval()))


def test_a_reused_buffer_of_a_layer_is_not_poisoned_when_it_is_asked() -> None:
    """Asking a layer whether it mixes samples runs it on NaN; what it counts must not show that."""

    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.seen += x.detach().sum()
        return x * m.weight  # type: ignore[no-any-return]

    module = Forward(forward)
    module.register_buffer("seen", torch.zeros(()))
    trainer = private(nn.Sequential(module))
    trainer.model(torch.ones(2, 3))
    assert module.get_buffer("seen").item() == 6.0


def test_parameters_freed_before_the_gradient_arrives_are_an_error_on_every_rank(ranks: Ranks) -> None:
    def body(rank: int) -> str:
        module = nn.Sequential(Forward(lambda m, x: x * m.weight), nn.ReLU())
        model = ShardedModel(module, [], collectives.axis(), True)
        trainer = Trainer(
            model, lambda y, t: y.sum(1), lambda p: torch.optim.SGD(p, lr=1.0), Options(1, privacy=Privacy(Flat(1.0)))
        )
        module.register_forward_hook(lambda m, args, y: y.register_hook(lambda g: model.reshard()) and None)
        with pytest.raises(
            RuntimeError, match="0: its norm rule needs its parameters, and its sharding unit was freed"
        ):
            step(trainer, torch.ones(rank, 3))
        return "refused"

    assert ranks(body, 2) == ["refused"] * 2


def hinge(outputs: Tensor, targets: Tensor) -> Tensor:
    """Through signs, which no NaN goes."""
    return F.relu(1 - outputs * (targets + targets.roll(1, 0)).sign()).sum(1)


def of_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    chosen = (targets + targets.roll(1, 0))[:, 0].nan_to_num().abs().floor() % outputs.shape[1]
    return F.cross_entropy(outputs, chosen.long(), reduction="none")


@pytest.mark.parametrize("loss", [hinge, of_classes])
def test_targets_of_others_are_seen_behind_signs_zeros_and_equal_logits(
    loss: Callable[[Tensor, Tensor], Tensor],
) -> None:
    assert independence.mixes_targets(loss, torch.zeros(3, 2), torch.zeros(3, 2))
    alone = partial(F.mse_loss, reduction="none")
    assert not independence.mixes_targets(lambda y, t: alone(y, t).sum(1), torch.zeros(3, 2), torch.zeros(3, 2))


@pytest.mark.parametrize("entries", [2, 4, 5, 6])
def test_a_constant_of_any_length_is_not_taken_for_samples_of_integers(entries: int) -> None:
    """Of three tokens made-up rows are two and four; what mixes is refused whatever their number."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weights = torch.arange(entries).float()
        return self.embedding(x).sum(1) * weights.sum()  # type: ignore[no-any-return]

    tokens = torch.tensor([[0, 1, 2], [2, 1, 0]])
    step(private(Parts(forward, embedding=nn.Embedding(3, 2))), tokens)

    def mixing(self: Any, x: Tensor) -> Tensor:
        return self.embedding(x).sum(1) + self.embedding(x).sum((0, 1))  # type: ignore[no-any-return]

    with pytest.raises(NotImplementedError, match="mixes the samples"):
        step(private(Parts(mixing, embedding=nn.Embedding(3, 2))), tokens)
