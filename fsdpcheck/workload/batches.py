"""The dataset of a case, and which rank gets which samples of it at which step and in which micro-batch.

Legend: B samples of a logical batch, b of a micro-batch, D = B * steps of the dataset, T positions, d input features,
F features of the flattened body output, R rows of the instrument, W ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from fractions import Fraction

import torch
from torch import Tensor

from fsdpcheck.adapters.contract import Batch, MicroBatch
from fsdpcheck.case import TrainingCase, prng
from fsdpcheck.case.shapes import body_input
from fsdpcheck.workload import models
from fsdpcheck.workload.user_model import loading as user_model

_WIDE = (31, 63, 127)
"""Largest targets, of 5 to 7 bits of the 8 of a bfloat16: the rest is for the samples of a micro-batch."""

Indices = tuple[tuple[tuple[int, ...], ...], ...]


def indices(case: TrainingCase, step: int) -> Indices:
    """Global sample indices of one step: per rank, per micro-batch. Step k uses samples k*B .. (k+1)*B-1.

    Micro-batches are near-equal consecutive chunks of the rank's list, the longer ones first; chunks may be empty. A
    rank that has one fewer than others is not given its last, which is empty.
    """
    everyone = enumerate(_per_rank(case, step))
    return tuple(_chunks(local, case.step.micro_batches, case.has_fewer(rank)) for rank, local in everyone)


def logical_batch(case: TrainingCase, step: int) -> Counter[int]:
    """Multiset of the samples of one step: a replicated batch once, wrap-around duplicates with multiplicity."""
    return Counter(i for local in _per_rank(case, step)[:: case.copies] for i in local)


def inputs(case: TrainingCase) -> Tensor:
    """The dataset's inputs: [D, d], [D, T, d], [D, C, L, ...], or int64 tokens [D, T]; a user's in their own shape.

    With a LayerNorm in front every row is balanced: half +2^k, half -2^k, with 2^k <= arithmetic.inputs. Then mean 0,
    variance 4^k and the normalised row +-1 are exact. Not so real numbers, which are fractions everywhere.
    """
    spec, samples = case.model, _samples(case)
    if spec.own is not None:
        return _user_values(case, "inputs", user_model.samples(spec.own.batch, samples)[0], case.arithmetic.inputs)
    if spec.input in ("tokens", "bags"):
        shape: tuple[int, ...] = (samples, spec.length)
        return torch.from_numpy(prng.integers(case.seed, "tokens", shape, 0, spec.vocabulary - 1))
    shape = (samples, *body_input(spec))
    if spec.layer_norm and case.arithmetic.numbers == "grid":
        return _balanced(case, shape).to(models.DTYPES[case.arithmetic.dtype])
    return models.drawn(case, "inputs", shape, case.arithmetic.inputs)


def targets(case: TrainingCase) -> Tensor:
    """The dataset's targets of the body, [D, F], in [-inputs - 1, inputs + 1], so that few errors vanish.

    Integers, or fractions if the case's numbers are real.
    """
    if case.model.own is not None:
        given = user_model.samples(case.model.own.batch, _samples(case))[1]
        return _user_values(case, "targets", given.reshape(len(given), -1), _largest_target(case) + 1).to(
            models.DTYPES[case.arithmetic.dtype]
        )
    shape = (_samples(case), models.body_features(case))
    return models.drawn(case, "targets", shape, case.arithmetic.inputs + 1)


def share(case: TrainingCase, averages: bool) -> float:
    """``Batch.loss_scale``: the number of shares of the batch over N, W/N, or 1/N when it is replicated.

    Where gradients are not averaged but only added up, that over the ranks that would be averaged over.
    """
    found = Fraction(case.shares) / Fraction(case.step.normaliser)
    return float(found if averages else found / case.mesh.data_ranks)


def batch(
    case: TrainingCase,
    step: int,
    rank: int,
    instrument: Tensor | None = None,
    device: torch.device | None = None,
    averages: bool = True,
) -> Batch:
    """What one rank is given at one step, on ``device`` (CPU if None).

    ``instrument`` [steps, D, G * R] are the targets of the instruments of G clipping groups, zeros if None. Packed
    targets are [b, F + G * R]. ``averages``: see ``share``.
    """
    all_inputs, body_DF = inputs(case), targets(case)
    if instrument is None:
        rows_DR = body_DF.new_zeros(len(body_DF), models.instrument_width(case))
    else:
        rows_DR = instrument[step].to(body_DF.dtype)
    packed_DP = torch.cat([body_DF, rows_DR], dim=1)
    micro_batches = tuple(
        MicroBatch(all_inputs[list(chunk)].to(device), packed_DP[list(chunk)].to(device), chunk)
        for chunk in indices(case, step)[rank][: case.step.micro_batches - case.has_fewer(rank)]
    )
    return Batch(micro_batches, share(case, averages))


def _user_values(case: TrainingCase, stream: str, given: Tensor, bound: int) -> Tensor:
    """A user's own data: integers as they are; fractions in the case's dtype, or integers drawn in their place."""
    if not given.is_floating_point():
        return given.clone()
    if case.arithmetic.numbers == "real":
        return given.to(models.DTYPES[case.arithmetic.dtype], copy=True)
    return models.drawn(case, stream, tuple(given.shape), bound)


def _largest_target(case: TrainingCase) -> int:
    """Where a user's model computes in few bits, gradients take them all by targets, or no rounding would show."""
    return case.arithmetic.inputs if case.arithmetic.compute == "dtype" else _WIDE[case.seed % len(_WIDE)]


def _samples(case: TrainingCase) -> int:
    return case.layout.batch_size * case.step.steps


def _per_rank(case: TrainingCase, step: int) -> list[list[int]]:
    """Every rank's samples at one step, in order."""
    shares = _per_data_rank(case, step)
    return [own for own in shares for _ in range(case.mesh.model_ranks)]


def _per_data_rank(case: TrainingCase, step: int) -> list[list[int]]:
    """The same, of one of the ranks that share out one model."""
    layout, world = case.layout, case.mesh.data_ranks
    order = list(range(step * layout.batch_size, (step + 1) * layout.batch_size))
    if layout.lists:
        return [[order[place] for place in own] for own in layout.lists for _ in range(world // len(layout.lists))]
    if layout.kind == "replicated":
        return [order] * world
    if layout.kind == "strided":
        return [order[rank::world] for rank in range(world)]
    if layout.kind == "sampler":
        shuffled = [order[i] for i in prng.permutation(case.seed, f"shuffle {step}", len(order))]
        return _sampler(shuffled if layout.shuffle else order, world, layout.drop_last)
    sizes = layout.local_sizes(world)
    starts = [sum(sizes[:rank]) for rank in range(world)]
    return [order[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _sampler(order: list[int], world: int, drop_last: bool) -> list[list[int]]:
    """torch.utils.data.DistributedSampler: strided shares of equal length, by dropping or by wrapping around."""
    size = len(order) // world if drop_last else -(-len(order) // world)
    padded = (order * math.ceil(size * world / len(order)))[: size * world]
    return [padded[rank::world] for rank in range(world)]


def _chunks(local: list[int], count: int, fewer: bool) -> tuple[tuple[int, ...], ...]:
    """``count`` consecutive chunks whose lengths differ by at most one; the last of them empty if ``fewer``."""
    base, extra = divmod(len(local), count - fewer)
    starts = [chunk * base + min(chunk, extra) for chunk in range(count - fewer + 1)]
    return tuple(tuple(local[a:b]) for a, b in itertools.pairwise(starts)) + ((),) * fewer


def _balanced(case: TrainingCase, shape: tuple[int, ...]) -> Tensor:
    """Rows of even length, half of them +2^k and half -2^k in hashed order, int64."""
    keys = torch.from_numpy(prng.integers(case.seed, "inputs", shape, 0, (1 << 31) - 1))
    places = keys.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
    signs = torch.where(places < shape[-1] // 2, 1, -1)
    largest = case.arithmetic.inputs.bit_length() - 1
    exponents = torch.from_numpy(prng.integers(case.seed, "input exponents", shape[:-1], 0, largest))
    return signs * (2**exponents).unsqueeze(-1)
