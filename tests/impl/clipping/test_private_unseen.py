"""What would reach the released gradient past the norms is refused by name (see test_private_counted for the rest)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from fsdpcheck.impl.clipping.modes import Mode
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.sharding.collectives import ALONE
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer
from tests.common.tables import each
from tests.impl.clipping.test_private_refusals import Forward, Parts

PASSES = ["two_pass", "bookkeeping"]
ROWS = torch.tensor([[1.0, 2, 3], [3, 1, 2], [0, 2, 5]])
INTEGERS = torch.tensor([[1, 2, 3], [3, 1, 2], [0, 2, 5]])


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().flatten(1).sum(1)


def trainer_of(module: nn.Module, passes: Any = "two_pass") -> Trainer:
    options = Options(normaliser=1, privacy=Privacy(Flat(0.25), Mode(passes=passes)))
    return Trainer(ShardedModel(module, [], ALONE, True), loss, lambda p: torch.optim.SGD(p, lr=0.0), options)


def step(trainer: Trainer, x: Tensor = ROWS) -> None:
    trainer.step([MicroBatch(x, torch.zeros(len(x)), range(len(x)))])


def leaves_its_penalty(layer: Any, x: Tensor) -> Tensor:
    hidden: Tensor = x * layer.weight
    layer.penalty = hidden.square().sum(1, keepdim=True)
    return hidden.tanh()


def gives_an_object(layer: Any, x: Tensor) -> Any:
    hidden: Tensor = x * layer.weight
    return hidden.tanh(), SimpleNamespace(hidden=hidden)


def with_its_own_gradient(model: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    energy: Tensor = model.b(model.a(x).tanh())
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, force], 1)


def counts(layer: Any, x: Tensor) -> Tensor:
    layer.calls = getattr(layer, "calls", 0) + 1
    return x * layer.weight * layer.calls  # type: ignore[no-any-return]


class RunsAgain(torch.autograd.Function):
    """A checkpoint of the user's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:  # type: ignore[override]
        ctx.module, ctx.x = module, x.detach()
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            x = ctx.x.requires_grad_()
            torch.autograd.backward(ctx.module(x), gradient)
        return x.grad, None


def one_weight_twice() -> nn.Module:
    model = Parts(lambda m, x: F.linear(m.tokens(x).sum(1), m.weight), tokens=nn.Embedding(6, 3))
    model.register_parameter("weight", model.get_parameter("tokens.weight"))
    return model


def of_complex_numbers() -> nn.Module:
    model = Forward(lambda m, x: (x * m.weight).real)
    model.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def a_shared_row(layer: Any, x: Tensor, chosen: Tensor) -> Tensor:
    return x + layer.weight[chosen].sum()  # type: ignore[no-any-return]


class Called(nn.Module):
    """A layer with a weight [3] and any number of inputs."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.told = nn.Parameter(torch.ones(3)), forward

    def forward(self, *inputs: Any) -> Any:
        return self.told(self, *inputs)


UNKNOWN = "the norm rule of Linear knows no parameter weight_{}, .* write a module of its own"
BESIDE = "the loss depends on parameter {} beside the output of the layer that holds it .* in one tensor"
REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "weight_norm": (lambda: nn.Sequential(weight_norm(nn.Linear(3, 3))), ROWS, "0: " + UNKNOWN.format("g")),
    "spectral_norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(3, 3))), ROWS, "0: " + UNKNOWN.format("orig")),
    "pruned": (
        lambda: nn.Sequential(prune.random_unstructured(nn.Linear(3, 3), "weight", 1)),  # type: ignore[no-untyped-call]
        ROWS,
        "0: " + UNKNOWN.format("orig"),
    ),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3))),
        ROWS,
        "0.parametrizations.weight makes a weight of parameters .* write a module of its own",
    ),
    "complex": (
        of_complex_numbers,
        ROWS,
        r"\(root\): weight is complex, .* real and imaginary part as one real parameter",
    ),
    "left in an attribute": (
        lambda: Parts(lambda m, x: m.a(x) + m.a.penalty, a=Forward(leaves_its_penalty)),
        ROWS,
        BESIDE.format("a.weight"),
    ),
    "left in an object": (
        lambda: Parts(lambda m, x: m.a(x)[1].hidden + m.a(x)[0], a=Forward(gives_an_object)),
        ROWS,
        BESIDE.format("a.weight"),
    ),
    "a gradient of a gradient": (
        lambda: Parts(with_its_own_gradient, a=nn.Linear(3, 3), b=nn.Linear(3, 1)),
        ROWS,
        BESIDE.format("a.weight"),
    ),
    "recomputed by a function": (
        lambda: Parts(lambda m, x: RunsAgain.apply(m.a(x), m.b), a=nn.Linear(3, 3), b=nn.Linear(3, 3)),
        ROWS,
        "was formed inside the backward to layers' outputs, .* use_reentrant=False",
    ),
    "a weight beside the layer that holds it": (
        one_weight_twice,
        INTEGERS,
        r"\(root\) is a Parts without a norm rule, and tokens.weight inside it is its parameter weight too",
    ),
    "another order of samples": (
        lambda: Parts(lambda m, x: m.a(x.flip(0)).flip(0), a=nn.Linear(3, 3)),
        ROWS,
        "a is given sample 0 in a row of another sample, .* keep the order of samples",
    ),
    "integers mixed as real numbers": (
        lambda: Parts(lambda m, x: m.a(x.float() - x.float().mean(0)), a=nn.Linear(3, 3)),
        INTEGERS,
        "the forward that calls a, before it does: it mixes the samples",
    ),
    "as many shared rows as made-up ones": (
        lambda: Parts(lambda m, x: m.a(x) + m.b(torch.ones(2, 3)).sum(0), a=nn.Linear(3, 3), b=nn.Linear(3, 3)),
        ROWS[:2],
        "b gives 2 rows for 4 samples",
    ),
    "as many shared numbers as samples": (
        lambda: Parts(lambda m, x: m.a(x, torch.tensor([0, 1, 1])), a=Called(a_shared_row)),
        ROWS,
        r"a was called with a tensor of shape \(3,\) .* must have a row for each sample; keep .* in a buffer",
    ),
    "another output when run again": (
        lambda: nn.Sequential(Forward(counts)),
        ROWS,
        "gave another output when it was run again for its per-sample gradients: .* without counters",
    ),
}


@each("passes", PASSES)
@each("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_it_is_refused(name: str, passes: str) -> None:
    make, x, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=message):
        step(trainer_of(make(), passes), x)


def tripled(self: nn.Linear, x: Tensor) -> Tensor:
    return 3 * F.linear(x, self.weight, self.bias)


CHANGED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a hook on a gradient": (
        lambda m: m[0].weight.register_hook(lambda g: 3 * g),
        NotImplementedError,
        "parameter 0.weight has a hook on its gradient: .* exceed the bound; remove it",
    ),
    "a hook after a gradient": (
        lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(3)),
        NotImplementedError,
        "parameter 0.weight has a hook on its gradient",
    ),
    "a hook before all others": (
        lambda m: m[0].register_forward_hook(lambda m, args, y: 3 * y, prepend=True),
        RuntimeError,
        r"a forward hook was put before all others of 0 \(prepend=True\)",
    ),
    "another forward": (
        lambda m: setattr(m[0], "forward", lambda x: 3 * F.linear(x, m[0].weight)),
        NotImplementedError,
        "0: its forward or type was replaced after the trainer was made",
    ),
    "another type": (
        lambda m: setattr(m[0], "__class__", type("Other", (nn.Linear,), {"forward": tripled})),
        NotImplementedError,
        "0: its forward or type was replaced after the trainer was made",
    ),
    "training mode": (
        lambda m: m.train(),
        NotImplementedError,
        "1.a: it is random in training mode",
    ),
}


def of_one(model: Any, x: Tensor) -> Tensor:
    """Rows [B, 3] as sequences [B, 3, 1] and back, around an attention."""
    mixed: Tensor = model.a(x[..., None], x[..., None], x[..., None])[0]
    return mixed[..., 0]


def attending(dropout: float) -> nn.Module:
    return Parts(of_one, a=nn.MultiheadAttention(1, 1, dropout, batch_first=True))


@pytest.mark.parametrize("name", CHANGED)
def test_what_is_changed_after_the_trainer_is_made_is_refused(name: str) -> None:
    change, error, message = CHANGED[name]
    trainer = trainer_of(nn.Sequential(nn.Linear(3, 3), attending(0.5)).eval())
    change(trainer.model.module)
    with pytest.raises(error, match=message):
        step(trainer)


def over_all_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(outputs, targets, reduction="none").sum(1)
    return each / (targets != -100).sum()


def over_its_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(outputs, targets, reduction="none").sum(1)
    return each / (targets != -100).sum(1)


def from_the_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - (targets - targets.mean())[:, None]).square().sum(1)


def by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """It draws, as a loss may that smooths labels, and cannot take -1 as a class."""
    drawn = torch.rand(3, dtype=outputs.dtype)
    return F.cross_entropy(outputs * drawn, targets, reduction="none") * drawn[targets]


CLASSES = torch.tensor([[0, 1, -100], [2, -100, -100], [1, 1, 1]])
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, bool]] = {
    "a mean over all tokens": (over_all_tokens, CLASSES, True),
    "a mean over one's tokens": (over_its_tokens, CLASSES, False),
    "distance from the mean": (from_the_mean, torch.ones(3), True),
    "a weight for each class": (by_class, torch.tensor([0, 2, 1]), False),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_depends_on_other_targets_is_refused(name: str) -> None:
    told, targets, mixes = LOSSES[name]
    trainer = trainer_of(nn.Linear(3, 9) if targets.dim() == 2 else nn.Linear(3, 3))
    trainer.loss = lambda y, t: told(y.unflatten(1, (3, 3)) if t.dim() == 2 else y, t)
    if mixes:
        with pytest.raises(NotImplementedError, match="depends on the targets of others: it mixes the samples"):
            trainer.step([MicroBatch(ROWS, targets, range(3))])
    else:
        trainer.step([MicroBatch(ROWS, targets, range(3))])
        assert len(trainer.found.norms[0]) == 3
