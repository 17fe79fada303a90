"""One step of the single device taken again by many samples at once, in float64: what the proofs watch.

Legend: n samples of a step, F flattened body output, G clipping groups, R rows of an instrument.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import NotExact, excerpt
from fsdpcheck.oracle import Answer, StepAnswer
from fsdpcheck.workload import batches, models, numerics
from fsdpcheck.workload.clip_groups import is_instrument
from fsdpcheck.workload.losses import PerSampleLoss


def load(model: nn.Module, step: StepAnswer) -> None:
    """Give ``model`` the parameters that the single device had at the start of ``step``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(step.before[name])
            parameter.requires_grad_(name in step.gradients)


def data(case: TrainingCase, step: StepAnswer, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Inputs and packed targets [n, F + G * R] of some samples, float64, with a silent instrument."""
    samples = [step.samples[row] for row in rows]
    inputs, targets_nF = batches.inputs(case)[samples], batches.targets(case)[samples].double()
    silent = torch.zeros(len(samples), models.instrument_width(case), dtype=torch.float64)
    return inputs.double() if inputs.is_floating_point() else inputs, torch.cat([targets_nF, silent], 1)


def loss(case: TrainingCase) -> PerSampleLoss:
    """The case's loss at loss scale 1."""
    loss = models.loss_for(case)
    loss.scale = 1.0
    return loss


def trained(model: models.CaseModel) -> dict[str, nn.Parameter]:
    """The body's trained parameters."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and not is_instrument(name)}


def gradients(outputs: Tensor, trained: dict[str, nn.Parameter], weights: Tensor, keep: bool) -> tuple[Tensor, ...]:
    """Gradients of <weights, outputs> with respect to each of ``trained``; zeros for one that no output depends on."""
    if not trained:
        return ()
    return torch.autograd.grad(
        outputs, list(trained.values()), weights, retain_graph=keep, allow_unused=True, materialize_grads=True
    )


def loss_scalar(case: TrainingCase) -> float:
    """What a sample's loss is multiplied by besides its factor: the loss scale times W/N (1/N when replicated).

    Raises NotExact where that is no dyadic number.
    """
    share = Fraction(case.shares) / Fraction(case.step.normaliser)
    if share.denominator & (share.denominator - 1):
        raise NotExact(f"case, normaliser: losses times {share}, which is no dyadic number")
    return models.loss_scale(case) * float(share)


def reduces_exactly(answer: Answer, step: StepAnswer) -> bool:
    """Whether the sums over weighted samples are promised to be exact."""
    if answer.case.step.clipping == "probe":
        return False
    return not answer.rule.nested or not bool((step.factors != 1).any())


def require_same_alone(case: TrainingCase, answer: Answer, autocast: bool = False) -> None:
    """In the dtypes that it is to compute in the model gives each sample's gradient, alone, as ``answer`` has it.

    That is from float64. A model that names a dtype may compute something else elsewhere, and so may one that changes
    in place what it has cast. ``autocast``: under torch.autocast, with parameters in the case's dtype. Raises NotExact
    where it does, or raises.
    """
    copies = case.arithmetic.compute == "bfloat16" and not autocast
    computes = torch.bfloat16 if copies else models.DTYPES[case.arithmetic.dtype]
    told = f"in {computes}{' under torch.autocast' * autocast}".replace("torch.", "", 1)
    for where, got, wanted in _alone_or_cast(case, answer, computes, autocast, told):
        if not torch.equal(got.double(), wanted):
            raise NotExact(f"{where}: {told} your model gives other bits on a single device than in float64")


_Alone = tuple[str, Tensor, Tensor]
"""(where, gradient of a sample, the one in the answer)."""


def _alone_or_cast(
    case: TrainingCase, answer: Answer, computes: torch.dtype, autocast: bool, told: str
) -> list[_Alone]:
    """As the model is; where it raises, as in a policy, which casts what enters a unit, as a table in float32 added
    outside of it. Raises NotExact where it raises then too."""
    try:
        return list(_alone(models.build(case), case, answer, computes, autocast))
    except NotExact:
        raise
    except Exception:
        model = models.build(case)
        for module in model.modules():
            if any(value.is_floating_point() for value in module.parameters(recurse=False)):
                module.register_forward_pre_hook(functools.partial(_cast, computes), with_kwargs=True)
    try:
        return list(_alone(model, case, answer, computes, autocast))
    except NotExact:
        raise
    except Exception as error:
        raise NotExact(f"{told} your model raises on a single device: {excerpt.told(error)}") from error


def _cast(dtype: torch.dtype, module: nn.Module, args: Any, options: Any) -> tuple[Any, Any]:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in options.items()}


def _alone(
    model: models.CaseModel, case: TrainingCase, answer: Answer, computes: torch.dtype, autocast: bool
) -> Iterator[_Alone]:
    """Of each sample and parameter, with parameters in ``computes``."""
    dtype = models.DTYPES[case.arithmetic.dtype]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(computes)
    own = trained(model)
    with numerics.of(case):
        for k, step in enumerate(answer.steps):
            load(model, step)
            for row in range(len(step.samples)):
                inputs, targets = data(case, step, [row])
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    outputs = model(inputs.to(computes) if inputs.is_floating_point() else inputs)
                losses = models.loss_for(case)(outputs.to(dtype), targets.to(dtype))
                found = gradients(losses, own, torch.ones_like(losses), keep=False)
                for name, gradient in zip(own, found, strict=True):
                    yield f"step {k}, {name}", gradient, step.gradients[name][row]
