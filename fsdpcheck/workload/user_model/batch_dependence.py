"""Whether what a user's model gives for a sample depends on how many samples are computed with it, or on its place.

Batches of other numbers of samples run through other kernels, which round otherwise, so that bits cannot be compared.
What one device computes of a batch in float32 shows how far rounding takes this very model; in float64 it takes it
2^29 times less far. So a difference in float64 between one batch and another that is larger than that between the two
dtypes is no rounding. On cases of integers bits are compared, where a finding would be told
(judging/model_refusals.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from fsdpcheck.errors import UsageError
from fsdpcheck.process_state.seeds import fixed_seeds
from fsdpcheck.workload.user_model import casting
from fsdpcheck.workload.user_model import loading as user_model

WHOLE: Final = 9
"""Samples of the batch that others are compared with: the most that a rank is given at once."""
WINDOWS: Final = (*((1, 1 + size) for size in range(1, WHOLE - 1)), (0, WHOLE - 1))
"""Rows of it that are run by themselves: of each number, at another place, or with another sample at the end."""


@dataclass(frozen=True)
class _Given:
    """Of some samples outputs [n, ...] and losses [n]; gradients of the sum of the losses of some of them."""

    outputs: Tensor
    losses: Tensor
    gradients: Callable[[slice], Tensor]


def require_separate(build: str, loss: str, inputs: Tensor, targets: Tensor) -> None:
    """Raises UsageError where outputs, losses or gradients of samples depend on their number or place.

    The model runs in float64 and in float32, with its own weights and with drawn ones: its own may hide it, as a head
    of zeros does.
    """
    for drawn in (False, True):
        model = user_model.model(build)
        if drawn:
            _draw(model)
        _require(build, loss, model, inputs[:WHOLE], targets[:WHOLE])


def _require(build: str, loss: str, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    function = user_model.loss(loss)
    narrow = _given(copy.deepcopy(model), function, inputs, targets, torch.float32)
    whole, rows = _given(model, function, inputs, targets, torch.float64), slice(0, WHOLE)
    rounded = [_far(a, b) for a, b in zip(_values(whole, rows), _values(narrow, rows), strict=True)]
    of_model, of_loss = f"model {build!r}", f"{loss!r}" if loss else f"model {build!r}"
    bent: list[tuple[tuple[int, int], Tensor, Tensor, bool]] = []
    for first, end in WINDOWS:
        try:
            part = _given(model, function, inputs[first:end], targets[first:end], torch.float64)
        except Exception:  # cases that come to it are refused
            continue
        among, alone = [*_values(whole, slice(first, end))], [*_values(part, slice(0, end - first))]
        other = [_far(a, b) > bound for a, b, bound in zip(among, alone, rounded, strict=True)]
        for place, (who, what) in enumerate(((of_model, "outputs"), (of_loss, "losses"))):
            if other[place]:
                _refuse(who, what, (first, end), among[place], alone[place])
        if bool(among[-1].any() or alone[-1].any()):
            bent.append(((first, end), among[-1], alone[-1], other[-1]))
    if bent and all(other for *_, other in bent):  # a kink where rounding decides bends some gradients, and not all
        _refuse(of_model, "gradients", *bent[0][:-1])


@torch.no_grad()
def only_rounds(build: str, one: Tensor, two: Tensor) -> bool:
    """Whether outputs [n, ...] of two batches that differ in their last sample differ before it by rounding alone.

    They do where experts are given other numbers of rows, and so other kernels. A model that raises in float64 does not
    show it.
    """
    found = []
    for dtype in (torch.float32, torch.float64):
        model = casting.cast(user_model.model(build), dtype)
        try:
            found.append([model(part.to(dtype) if part.is_floating_point() else part)[:-1] for part in (one, two)])
        except Exception:
            return False
    (narrow, _), (whole, exchanged) = found
    return _far(whole, exchanged) <= _far(whole, narrow)


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    """Give the parameters values of about the size with which a layer neither blows up nor dies out."""
    with fixed_seeds():
        for parameter in model.parameters():
            fan_in = parameter.numel() // len(parameter) if parameter.dim() > 1 and len(parameter) else 0
            parameter.uniform_(-1, 1).mul_((3 / fan_in) ** 0.5 if fan_in else 1)


def _given(model: nn.Module, loss: user_model.Loss, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> _Given:
    model = casting.cast(model, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inputs, targets = (part.to(dtype) if part.is_floating_point() else part for part in (inputs, targets))
    outputs = model(inputs)
    losses = loss(outputs, targets)

    def gradients(rows: slice) -> Tensor:
        if not losses.requires_grad:
            return losses.new_zeros(0)
        chosen = torch.zeros_like(losses)
        chosen[rows] = 1
        found = torch.autograd.grad(
            losses, trained, chosen, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(-1) for gradient in found])

    return _Given(outputs.detach(), losses.detach(), gradients)


def _values(given: _Given, rows: slice) -> Iterator[Tensor]:
    return iter((given.outputs[rows], given.losses[rows], given.gradients(rows)))


def _far(one: Tensor, other: Tensor) -> float:
    """The largest difference; NaN, which no difference exceeds, where something is no number."""
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _refuse(who: str, what: str, rows: tuple[int, int], among: Tensor, alone: Tensor) -> None:
    first, end = rows
    worst = int((among - alone).abs().argmax())
    got, other = float(among.reshape(-1)[worst]), float(alone.reshape(-1)[worst])
    those = f"sample {first}" if end == first + 1 else f"samples {first} to {end - 1}"
    raise UsageError(
        f"{who} mixes samples: {what} depend on how many are computed together, or on their place\n"
        f"  got     {got:.6g} among {what} of {those} in a batch of {WHOLE}, {other:.6g} in a batch of {end - first}"
        f" of them alone; float32 and float64 differ less\n"
        f"  wanted  the same {what} of a sample in any batch: ranks have fewer samples than one device\n"
        "  next    divide by no number of samples; what is averaged is averaged outside (the case's normaliser)"
    )
