"""Optimizers of a case, and what happens to parameters between two steps."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from fsdpcheck.case import OptimizerSpec, TrainingCase
from fsdpcheck.workload import models
from fsdpcheck.workload.newton_schulz import NewtonSchulz
from fsdpcheck.workload.row_scaling import RowScaled
from fsdpcheck.workload.user_model import own_optimizer

CACHE_LINE = 64


def make_optimizer(
    spec: OptimizerSpec, parameters: Iterable[nn.Parameter], apart: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer a case asks for, one parameter at a time: the fused kernels' bits depend on a buffer's position.

    ``apart``: the parameters of the last unit, of which "last unit apart" makes a group. Its learning rate follows the
    schedule by itself: every ``step()`` takes the scheduler along.
    """
    optimizer = _optimizer(spec, parameters, apart)
    if spec.schedule == "halving":
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def optimizer_for(
    case: TrainingCase, parameters: Mapping[str, nn.Parameter], step: int | None = None
) -> torch.optim.Optimizer:
    """The single device's optimizer of ``parameters``, by canonical name: drawn, or the user's own.

    ``step``: one with the learning rate of that step alone; None to follow the schedule.
    """
    spec = case.step.optimizer
    if spec.kind == "own":
        assert case.model.own is not None
        return own_optimizer.on(case.model.own, parameters)
    apart = [parameter for name, parameter in parameters.items() if in_last_unit(case, name)]
    return make_optimizer(spec if step is None else at_step(spec, step), parameters.values(), apart)


def in_last_unit(case: TrainingCase, name: str) -> bool:
    """Whether the parameter of this canonical name is of the case's last inner unit."""
    units = models.unit_names(case)
    return bool(units) and models.unit_of(case, name) in units[-1]


def at_step(spec: OptimizerSpec, step: int) -> OptimizerSpec:
    """``spec`` with the learning rate of one step (from 0), and no schedule."""
    return replace(spec, lr_exponent=spec.lr_exponent + step * (spec.schedule == "halving"), schedule="constant")


def resume_(optimizer: torch.optim.Optimizer) -> None:
    """Take the optimizer's state away and give it back from its ``state_dict``, as a resumed training would."""
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.state.clear()
    optimizer.load_state_dict(saved)


TOWARDS_ZERO: Final = 127 / 128
"""What is projected is multiplied by this first. An update to n + 1/2, as weight decay makes it where a gradient is 0,
is then not half way between two integers, where one rounding would decide. No dyadic number of few bits is."""


@torch.no_grad()
def project_(tensors: Iterable[Tensor], case: TrainingCase) -> None:
    """Round to integers and clamp to the range weights were drawn from, elementwise and in place.

    Equal bits in, equal bits out, whatever the sharding, and the same integers out where what comes in was rounded in
    another order: the next step starts in the exact domain again, and the laws compare what was recorded *before*.
    """
    bound = case.arithmetic.weights
    for tensor in tensors:
        tensor.mul_(TOWARDS_ZERO).round_().clamp_(-bound, bound)


def _groups(
    spec: OptimizerSpec, parameters: Iterable[nn.Parameter], last_unit: Collection[nn.Parameter]
) -> Iterable[Any]:
    """What an optimizer is given: the parameters, or those of one dimension, or of a unit, apart from the others."""
    if spec.groups == "one":
        return parameters
    known, last = list(parameters), {id(one) for one in last_unit}
    apart = [one.dim() <= 1 if spec.groups == "vectors apart" else id(one) in last for one in known]
    others, own = ([one for one, holds in zip(known, apart, strict=True) if holds == own] for own in (False, True))
    group = {"params": own, "weight_decay": 0.0, "lr": 2.0 ** -(spec.lr_exponent + 1)}
    return [group for group in ({"params": others}, group) if group["params"]] or known


def _optimizer(
    spec: OptimizerSpec, given: Iterable[nn.Parameter], last_unit: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    parameters, lr = _groups(spec, given, last_unit), 2.0**-spec.lr_exponent
    if spec.kind == "sgd":
        return torch.optim.SGD(
            parameters, lr=lr, momentum=spec.momentum, weight_decay=spec.weight_decay, foreach=False, maximize=False
        )
    if spec.kind == "newton_schulz":
        return NewtonSchulz(parameters, lr)
    if spec.kind == "row_scaled":
        return RowScaled(parameters, lr)
    kind = torch.optim.Adam if spec.kind == "adam" else torch.optim.AdamW
    return kind(parameters, lr=lr, weight_decay=spec.weight_decay, foreach=False)
