"""A training repository that trains privately: each sample clipped by itself, and noise; right or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

Batches = Iterable[tuple[Tensor, Tensor]]
Losses = Callable[[Tensor, Tensor], Tensor]
Optimizer = torch.optim.Optimizer


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each rank has the whole model; the step adds up."""
    return model


def _samples(model: nn.Module, batches: Batches, losses: Losses) -> Iterator[list[Tensor]]:
    """The gradients of each sample by itself."""
    trained = [value for value in model.parameters() if value.requires_grad]
    for inputs, targets in batches:
        for row in range(len(inputs)):
            loss = losses(model(inputs[row : row + 1]), targets[row : row + 1]).sum()
            yield list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))


def _norm(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()


def _nested(gradients: list[Tensor]) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients]).norm()


def _clipped(
    model: nn.Module,
    batches: Batches,
    losses: Losses,
    max_grad_norm: float,
    norm: Callable[[list[Tensor]], Tensor] = _norm,
    eps: float = 1e-6,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """This rank's sum of clipped gradients, with norms and factors."""
    trained = [value for value in model.parameters() if value.requires_grad]
    total, norms, factors = [torch.zeros_like(value) for value in trained], [], []
    for gradients in _samples(model, batches, losses):
        norms.append(norm(gradients))
        factors.append((max_grad_norm / (norms[-1] + eps)).clamp(max=1.0))
        for own, gradient in zip(total, gradients, strict=True):
            own += factors[-1] * gradient
    none = trained[0].new_zeros(0)
    return total, {
        "norms": torch.stack(norms) if norms else none,
        "factors": torch.stack(factors) if factors else none,
    }


def _release(model: nn.Module, optimizer: Optimizer, total: list[Tensor], normaliser: float) -> None:
    trained = [value for value in model.parameters() if value.requires_grad]
    for value, own in zip(trained, total, strict=True):
        value.grad = own / normaliser
    optimizer.step()


def private(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> dict[str, Tensor]:
    total, shown = _clipped(model, batches, losses, max_grad_norm)
    for own in total:
        dist.all_reduce(own)
    _release(model, optimizer, total, normaliser)
    return shown


def nested(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> None:
    """Norms of norms, and shows nothing."""
    total, _ = _clipped(model, batches, losses, max_grad_norm, _nested)
    for own in total:
        dist.all_reduce(own)
    _release(model, optimizer, total, normaliser)


def noisy(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    losses: Losses,
    max_grad_norm: float,
    normaliser: float,
    noise_multiplier: float,
    seed: int,
) -> None:
    _noisy(model, optimizer, batches, losses, max_grad_norm, normaliser, noise_multiplier, seed)


def _noisy(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    losses: Losses,
    max_grad_norm: float,
    normaliser: float,
    noise_multiplier: float,
    seed: int,
    before: bool = False,
) -> None:
    if not hasattr(model, "_noise"):
        model._noise = torch.Generator().manual_seed(seed)
    total, _ = _clipped(model, batches, losses, max_grad_norm)
    for own in total:
        drawn = torch.randn(own.shape, generator=model._noise, dtype=own.dtype) * (noise_multiplier * max_grad_norm)
        if before:
            own += drawn
        dist.all_reduce(own)
        if not before:
            own += drawn
    _release(model, optimizer, total, normaliser)


def noise_on_each_rank(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    losses: Losses,
    max_grad_norm: float,
    normaliser: float,
    noise_multiplier: float,
    seed: int,
) -> None:
    """Adds the noise before ranks are added up: W times too much."""
    _noisy(model, optimizer, batches, losses, max_grad_norm, normaliser, noise_multiplier, seed, before=True)


def clips_the_sum(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> None:
    """Clips what a rank has added up, and no sample."""
    total = [torch.zeros_like(value) for value in model.parameters() if value.requires_grad]
    for gradients in _samples(model, batches, losses):
        for own, gradient in zip(total, gradients, strict=True):
            own += gradient
    factor = (max_grad_norm / (_norm(total) + 1e-6)).clamp(max=1.0)
    for own in total:
        own *= factor
        dist.all_reduce(own)
    _release(model, optimizer, total, normaliser)


def leaves_biases_out(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> None:
    """Forms norms of matrices alone."""
    total, _ = _clipped(
        model, batches, losses, max_grad_norm, lambda own: _norm([each for each in own if each.dim() > 1] or own)
    )
    for own in total:
        dist.all_reduce(own)
    _release(model, optimizer, total, normaliser)


def averages(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> None:
    """Divides by the number of ranks besides."""
    total, _ = _clipped(model, batches, losses, max_grad_norm)
    for own in total:
        dist.all_reduce(own)
        own /= dist.get_world_size()
    _release(model, optimizer, total, normaliser)


def without_eps(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> dict[str, Tensor]:
    """Factors of another rule than is said: C / n."""
    total, shown = _clipped(model, batches, losses, max_grad_norm, eps=0.0)
    for own in total:
        dist.all_reduce(own)
    _release(model, optimizer, total, normaliser)
    return shown


def shows_squares(
    model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses, max_grad_norm: float, normaliser: float
) -> dict[str, Tensor]:
    shown = private(model, optimizer, batches, losses, max_grad_norm, normaliser)
    return {**shown, "norms": shown["norms"] ** 2}


def no_bound(model: nn.Module, optimizer: Optimizer, batches: Batches, losses: Losses) -> None:
    """Takes no clip norm."""


def more(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    losses: Losses,
    max_grad_norm: float,
    normaliser: float,
    accountant: object,
) -> None:
    """Takes what nobody has."""
