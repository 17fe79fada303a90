"""What a step would have updated parameters to, had something happened to its optimizer right before it.

The cause that this alone tells: of an optimizer with several groups of parameters the options are lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from fsdpcheck.diagnosis.cause_fit import differs
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.workload.optimizer import optimizer_for

Parameters = Mapping[str, nn.Parameter]
Change = Callable[[torch.optim.Optimizer, Parameters], None]
"""What happens to the optimizer of these parameters, by canonical name."""


def after(answer: Answer, step: int, change: Change) -> Named:
    """Parameters after ``step``, up to which all was right, if ``change`` happened to the optimizer right before it."""
    parameters = {name: nn.Parameter(answer.steps[0].before[name].clone()) for name in answer.trainable}
    optimizer = optimizer_for(answer.case, parameters)
    for one in answer.steps[: step + 1]:
        for name, parameter in parameters.items():
            parameter.data.copy_(one.before[name])
            parameter.grad = one.used[name].clone() if name in one.used else None
        if one is answer.steps[step]:
            change(optimizer, parameters)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def of_lost_groups(answer: Answer, step: int, got: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Whether ``got`` are, bit for bit, what all parameters are with the options of the first group."""
    if answer.case.step.optimizer.groups == "one":
        return
    found = after(answer, step, _options_of_the_first)
    if differs(got, answer.steps[step].after) and not differs(got, found):
        text = "the optimizer's groups are lost: every parameter has the learning rate and weight decay of the first"
        yield Cause("groups lost", text)


def _options_of_the_first(optimizer: torch.optim.Optimizer, _: Parameters) -> None:
    first, *others = optimizer.param_groups
    for group in others:
        group.update({name: value for name, value in first.items() if name != "params"})
