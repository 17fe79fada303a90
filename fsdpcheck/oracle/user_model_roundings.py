"""How often a value is rounded on its way through the backward pass of a user's own model, at most.

A path from the losses to a parameter passes each operator of the backward pass once at most. So the longest sum in each
operator, added up over all of them, bounds the roundings of every path (Higham, Accuracy and Stability of Numerical
Algorithms, lemma 3.1: they multiply). Coarse, but a theorem for any graph.

Legend: B samples of a logical batch, n of them distinct, W ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import NotExact
from fsdpcheck.exact.operators import MOVES
from fsdpcheck.workload import batches, models, numerics

_INNER = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot"}
"""Sums over the last dim of the last but one operand."""
_ELEMENTWISE = {
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow", "gelu_backward", "silu_backward",
    "tanh_backward", "sigmoid_backward", "leaky_relu_backward",
}  # fmt: skip
_FEW = 4
"""Roundings of an elementwise operator, at most; what any operator may add to its sum, too."""
_SEVERAL = ("norm_backward", "softmax_backward_data", "dot_product")
"""Parts of names of operators that put sums one behind another, three at most, and a few roundings between them."""


@functools.lru_cache(maxsize=8)
def path_roundings(case: TrainingCase) -> int:
    """Most roundings on a path of the weighted backward pass of a case's own model, all samples and ranks together."""
    occurrences = [batches.logical_batch(case, k) for k in range(case.step.steps)]
    again = max(-(-sum(found.values()) * case.copies // max(len(found), 1)) for found in occurrences)
    return _counted(case, max(len(found) for found in occurrences)) * again


@functools.lru_cache(maxsize=8)
def terms_of_one(case: TrainingCase) -> int:
    """At most so many products of an activation and a gradient are added up to one element of one sample's gradient,
    over all positions and uses of a parameter."""
    return _counted(case, 1)


def _counted(case: TrainingCase, samples: int) -> int:
    if case.model.own is not None and case.model.own.names in ("bfloat16", "float16"):
        raise NotExact(f"your model computes in {case.model.own.names}, whose roundings are not bounded")
    model, loss = models.build(case), models.loss_for(case)
    inputs, targets = batches.inputs(case)[:samples], batches.targets(case)[:samples]
    silent = targets.new_zeros(len(targets), models.instrument_rows(case))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with numerics.of(case):
        losses = loss(model(inputs), torch.cat([targets, silent], 1))
        with _Sums() as sums:
            torch.autograd.grad(losses, trained, torch.ones_like(losses), allow_unused=True)
    return int(sums.total)


class _Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the longest sum of each operator inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in MOVES:
            name = func.overloadpacket.__name__
            terms = _longest(name, args)
            self.total += 3 * (_FEW + terms) if any(part in name for part in _SEVERAL) else _FEW + terms
        return func(*args, **(kwargs or {}))


def _longest(name: str, args: Any) -> int:
    operands = [value for value in args if isinstance(value, Tensor) and value.is_floating_point()]
    if not operands or name in _ELEMENTWISE:
        return 0
    if name in _INNER:
        return int(operands[-2].shape[-1])
    return max(value.numel() for value in operands)
