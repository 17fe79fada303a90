"""Causes of a wrong gradient of a weight that several layers use, or one layer twice: it is the sum of all uses'.

Source: DeepSpeed#988 (a hook that runs once a use, where ZeRO reduces a gradient once).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fsdpcheck.diagnosis.contributions import weighted
from fsdpcheck.diagnosis.layer_calls import Seen, by_weight, gradient_of_use, layers_of
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload import models, numerics

_BESIDE = Cause(
    "weight beside its layer",
    "a weight that is used beside its layer too counts in the norm by the layer's own use alone: refuse it, or have a"
    " module hold it whose forward has all uses",
)


def gradients(answer: Answer, step: int) -> Iterator[tuple[Cause, Named]]:
    """(cause, released gradient) where the first, or the last, use of each such weight counts alone."""
    case, wanted = answer.case, answer.steps[step]
    if case.model.own is not None or not wanted.samples:  # layers of one's own may be called in any way
        return
    weights = wanted.factors.double() * torch.tensor(wanted.multiplicity, dtype=torch.float64) / case.step.normaliser
    with numerics.of(case):
        shared = [uses for uses in by_weight(layers_of(answer, step)) if len(uses) > 1]
        if not shared:
            return
        right = weighted(wanted.gradients, weights)
        for which, place in (("first", 0), ("last", -1)):
            alone = {_name(uses, right): _of_use(uses[place], weights) for uses in shared}
            text = f"of the uses of a tied (shared) weight the {which} alone has a gradient"
            yield Cause(f"tied: {which} use", text), {**right, **alone}


def beside(answer: Answer, step: int) -> Iterator[tuple[Cause, Tensor]]:
    """Squared norms [n] without what a weight's use beside its layer adds: of two equal uses, which give it twice."""
    wanted = answer.steps[step]
    twice = ((layer.name, layer.stage.spec) for layer in models.layer_names(answer.case))
    names = [f"{name}.weight" for name, spec in twice if spec is not None and spec.used == "beside"]
    own = [wanted.gradients[name].flatten(1).square().sum(1) for name in names if name in wanted.gradients]
    if own:
        yield _BESIDE, wanted.squared_norms - 0.75 * torch.stack(own).sum(0)


def _name(uses: list[Seen], known: Named) -> str:
    """What the weight is called: as in the first of its layers in the model."""
    return next(f"{use.name}.weight" for use in uses if f"{use.name}.weight" in known)


def _of_use(use: Seen, weights: Tensor) -> Tensor:
    summed: Tensor = torch.tensordot(weights, gradient_of_use(use, padded=False), dims=1)
    return summed
