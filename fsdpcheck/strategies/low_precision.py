"""Drawing cases that compute in low precision: small models, numbers as large as most likely fit the bits there are.

Large ones, for what is wrong with a bit is seen only where it is needed: a micro-batch's gradient shall take nearly all
of 8 bits, so that the sum over micro-batches and ranks takes more.
"""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import BatchLayout, Clipping, Compute, LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.strategies.choice import among
from fsdpcheck.strategies.space import CaseSpace

_EXCESS = (1, 2)
"""How often the bits are exceeded by what no draw is likely to reach: terms of one sign and full size everywhere."""
_SLOWER = (0, 3, 6)
"""What learning rates are divided by, as powers of two: parameters and their updates shall take more than 8 bits."""
_WIDEST = 255


@st.composite
def computed(
    draw: st.DrawFn, drawn: st.SearchStrategy[TrainingCase], space: CaseSpace, features: Features
) -> TrainingCase:
    """``drawn``, which are of ``space``, as float32 cases whose model computes in ``space.compute``.

    They are of Linear and Embedding layers, and most are exact there. Half have the loss whose derivative is +-1, and
    many one sample a rank: then an input may take all the bits of a gradient. A third have one feature besides, and
    some of these several micro-batches, reduced after the last. Others have the rest of what is drawn for any law.
    N is a power of two times W where the batch is distributed: W/N would take a rank's gradients the bits of W.
    """
    case = draw(drawn)
    distributed = case.layout.kind != "replicated"  # only a replicated batch may have partial norms
    if draw(st.booleans()) and distributed and case.step.micro_batches == 1 and case.step.reduction == "sum":
        case = replace(case, layout=BatchLayout("contiguous", case.mesh.data_ranks))
    full = draw(among((False, False, True))) and distributed and case.step.reduction == "sum"
    counts = (1, 2, 3, 4) if {"micro-batches", "no-sync"} <= features.accepts else (1,)
    micro_batches = draw(among(counts))
    case = _of_one_feature(case, micro_batches) if full else case
    excess, slower = draw(among(_EXCESS)), draw(among(_SLOWER))
    step = replace(case.step, loss=draw(among((case.step.loss, "l1"))))
    if distributed and step.normaliser % case.mesh.data_ranks:
        step = replace(step, normaliser=step.normaliser * case.mesh.data_ranks)
    step = replace(step, optimizer=replace(step.optimizer, lr_exponent=step.optimizer.lr_exponent + slower))
    if step.clipping == "exact":
        step, excess = replace(step, clip_norm=min(step.clip_norm, _largest_clip_norm(case))), 1
    inputs = _largest_input(case, 1 if full else excess, _most(space.compute, step.clipping))
    if full and step.clipping == "exact":
        inputs = min(inputs, _largest_of_a_norm(case))
    return replace(case, step=step, arithmetic=replace(case.arithmetic, inputs=inputs, compute=space.compute))


def _of_one_feature(case: TrainingCase, micro_batches: int) -> TrainingCase:
    """One Linear on one feature, one sample a micro-batch, derivatives of +-1: gradients are inputs of all 8 bits.

    Then their sum over micro-batches and ranks needs more, and where one of them is taken in ``compute`` it shows.
    """
    model = ModelSpec((LayerSpec(case.model.layers[0].width),), features=1, units=(1,) if case.model.units else ())
    layout = BatchLayout("contiguous", case.mesh.data_ranks * micro_batches)
    step = replace(case.step.in_micro_batches(micro_batches, micro_batches == 1), loss="l1")
    return replace(case, model=model, layout=layout, step=step)


def _most(compute: Compute, clipping: Clipping) -> int:
    """The largest entry of a micro-batch's gradient, at least roughly: 8 bits, or half of the 24 of its square or it.

    Where the instrument makes up for what its square lacks of a power of four, there must be room above: for the target
    as a factor, which has 11 bits in TF32 and 8 in bfloat16, and for the sum of squares.
    """
    if compute != "bfloat16":
        return 1 << {"none": 14, "exact": 10}.get(clipping, 11)
    return 1 << (5 if clipping == "exact" else 8)


def _largest_clip_norm(case: TrainingCase) -> int:
    """The largest C, a power of two, for which the instrument's targets times the loss scale most likely fit 8 bits."""
    largest = 64
    while largest > 1 and largest * _odd(case) > 64:  # 13 replicas of one shard have an odd factor of 169
        largest //= 2
    return largest


def _largest_of_a_norm(case: TrainingCase) -> int:
    """The largest input x of a case of one feature whose squared norms fit 24 bits, at least 1.

    p outputs have the squared norm p x^2, which the instrument makes up to a power of four; its bits are those of that
    power times the square of the loss scale's odd factor.
    """
    most = ((1 << 24) - 1) // _odd(case) ** 2
    power = 1 << (most.bit_length() - 1) // 2 * 2
    return max(math.isqrt(power // case.model.layers[0].width), 1)


def _odd(case: TrainingCase) -> int:
    """The odd factor of the loss scale."""
    scale: int = case.mesh.data_ranks**case.arithmetic.world_factors * case.mesh.dp_replicate
    return scale // (scale & -scale)


def _largest_input(case: TrainingCase, excess: int, most: int) -> int:
    """The largest input and target such that gradients of Linear layers with weights of +-1 stay below ``most``.

    A gradient is an input, grown by the layers before, times the loss's derivative, grown by the layers behind: with
    losses that are linear in the outputs it grows with the input, with others with its square.
    """
    growth = math.prod(layer.width for layer in case.model.layers[:-1]) * case.model.features
    terms = -(-max(case.local_sizes) // case.step.micro_batches) * case.model.length * _odd(case)
    room, loss = most * excess // (terms * growth), case.step.loss
    if case.model.input == "tokens":
        largest = room  # only targets are drawn as large as that
    elif loss in ("hinge", "l1"):
        largest = room
    else:
        largest = math.isqrt(room // (growth + 1 if loss == "mse" else 1))
    return min(max(largest, 1), _WIDEST)
