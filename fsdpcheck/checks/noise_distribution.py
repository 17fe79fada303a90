"""Checks of how noise is distributed: its scale, its shape, and that no part of it tells of another.

Legend: N the normaliser, C the clip norm (the root of the sum of C_l^2 where groups of parameters are clipped apart), s
the noise multiplier, n draws, z noise over s C / N, K steps, P parameters, W ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fsdpcheck import diagnosis
from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import (
    Arithmetic,
    BatchLayout,
    ClipGroups,
    Contribution,
    LayerSpec,
    LayoutKind,
    MeshSpec,
    ModelSpec,
    StepSpec,
    TrainingCase,
)
from fsdpcheck.checks import gaussian_limits
from fsdpcheck.checks._compare import require_same_form
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.noise import FALSE_ALARM, same_on_all_ranks, standing
from fsdpcheck.diagnosis.noise import ALIKE, Related, Scaled
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer

_WIDE, _NARROW, _FEATURES = 600, 60, 640
"""Rows of the large weight and of the middling one, and columns of the large one, whose n = 384,000 draws show 1 %."""
_STEPS = 2
_LARGEST_WORLD = 5


class _Part(NamedTuple):
    """The noise of one parameter at one step: z [n], and how many rows the parameter has."""

    step: int
    name: str
    z: Tensor
    rows: int

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}"


def large(features: Features, world_sizes: tuple[int, ...]) -> list[TrainingCase]:
    """Cases of which the noise is known without another run, with parameters of all sizes, in two steps.

    Their logical batches are empty, so that they release noise alone; where a rank without samples is not accepted, in
    steps that move no parameter and clip no sample. On the most ranks of up to five, or if noise is not promised to be
    a function of the seed, on each of those numbers. Where they are accepted: in two micro-batches; a case with a clip
    norm for each unit, and with replicas; one of the secure generator; one of a batch that all ranks share, and one of
    which the ranks of each replica share a part, with partial norms where they are promised. N is half the number of
    ranks where that is odd, and may be a fraction; of shared batches it is 32.
    """
    worlds = sorted({size for size in world_sizes if size <= _LARGEST_WORLD}) or [min(world_sizes)]
    asked = worlds[-1:] if "noise-of-seed" in features.promises else worlds
    found = [_on(MeshSpec(world), features) for world in reversed(asked)]
    even = max((size for size in worlds if size % 2 == 0), default=0)
    replicas, units = even and "hsdp" in features.accepts, "per-layer-clipping" in features.accepts
    mesh = MeshSpec(even // 2, 2) if replicas else MeshSpec(worlds[-1])
    if replicas or units:
        found.append(_on(mesh, features, "units" if units else "all"))
    if "secure-noise" in features.accepts:  # the last of several, or one more
        found[1:] = [*found[1:-1], replace(found[-1], step=replace(found[-1].step, secure_noise=True))]
    return [*found, *_of_shared_batches(MeshSpec(worlds[-1]), mesh, features)]


def _of_shared_batches(flat: MeshSpec, mesh: MeshSpec, features: Features) -> Iterator[TrainingCase]:
    """All ranks, and all of each replica, have the same samples, namely none; complete norms, partial and both."""
    if "empty-rank" not in features.accepts:
        return
    kinds: tuple[tuple[LayoutKind, MeshSpec, int, Contribution], ...] = (
        ("replicated", flat, 1, "partial"),
        ("by-replica", mesh, mesh.dp_replicate, "mixed"),
    )
    for kind, on, lists, contribution in kinds:
        case = _on(on, features)
        layout = BatchLayout(kind, 1, lists=((),) * lists)
        known = contribution if "partial-norms" in features.promises else "complete"
        step = replace(case.step, contribution=known, normaliser=32)
        shared = replace(case, layout=layout, step=step)
        if shared.copies > 1 and features.takes(shared):
            yield shared


def _on(mesh: MeshSpec, features: Features, clip_groups: ClipGroups = "all") -> TrainingCase:
    """Rows are multiples of the number of shards."""
    wide, narrow = (-(-rows // mesh.dp_shard) * mesh.dp_shard for rows in (_WIDE, _NARROW))
    bias, micro_batches = "bias" in features.accepts, 2 if "micro-batches" in features.accepts else 1
    model = ModelSpec((LayerSpec(wide, bias), LayerSpec(narrow, bias)), features=_FEATURES, units=(1, 1))
    world, fraction = mesh.world_size, "fractional-normaliser" in features.accepts
    normaliser = world / 2 if fraction and world % 2 and world > 1 else 32 * world
    step = StepSpec("linear", _STEPS, micro_batches, normaliser=normaliser, clipping="exact", clip_norm=3,
                    noise_multiplier=1.5, clip_groups=clip_groups)  # fmt: skip
    if "empty-rank" in features.accepts:
        layout = BatchLayout("listed", 1, lists=((),) * mesh.world_size)
        return TrainingCase(model, mesh, layout, step, Arithmetic(project=False), seed=1)
    layout = BatchLayout(batch_size=micro_batches * mesh.world_size)
    case = TrainingCase(
        model, mesh, layout, replace(step, clipping="unclipped", steps=1), Arithmetic(project=False), seed=1
    )
    return standing(case, _STEPS) if "project" in features.accepts else case


def assert_noise_scale(execution: Execution, answer: Answer) -> None:
    """Noise is what independent N(0, (s C / N)^2) may be, beyond what the answer releases without noise.

    Of honest noise the probability to be called wrong is ``FALSE_ALARM`` at most, in equal shares over K (3 P + 1)
    tests: of each parameter at each step the mean square, the distribution (Kolmogorov's distance) and the largest
    draw, and at each step the mean square over all but the largest parameter.
    """
    parts = _parts(execution, answer)
    rest = [_all_but_the_largest(list(own)) for _, own in itertools.groupby(parts, lambda part: part.step)]
    tested = [*parts, *(part for part in rest if part is not None)]
    alarm = float(FALSE_ALARM) / max(len(tested) + 2 * len(parts), 1)
    scaled = [_scaled(part, alarm) for part in tested]
    if wrong := [each for each in scaled if not each.low <= each.found <= each.high]:
        worst = max(wrong, key=lambda each: (-each.step, each.draws))
        raise Violation(
            "the noise has the wrong scale",
            got=f"{worst.found!r} * s C / N over {worst.draws} draws",
            wanted=f"between {worst.low!r} and {worst.high!r}, s C / N = {_deviation(answer)!r}",
            where=f"step {worst.step}, every rank, {worst.parameter or 'all but the largest parameter'}",
            cause=partial(diagnosis.noise.of_scales, answer, scaled),
        )
    for part in parts:
        _require_gaussian(part, alarm)


def assert_noise_independent(execution: Execution, answer: Answer) -> None:
    """No part of the noise is correlated with another, whatever its scale: steps, parameters, elements, rows, shards.

    Of two parameters or steps elements are compared that have one place in the flattened tensors; of each parameter
    those that are a power of two apart, and rows; of the largest each two of the ranks' equal shares. Honest noise is
    called wrong with probability ``FALSE_ALARM`` at most, in equal shares over all pairs.
    """
    pairs = list(_pairs(_parts(execution, answer), answer.case.mesh.dp_shard))
    alarm = float(FALSE_ALARM) / max(len(pairs), 1)
    wrong = [(each, limit) for each, limit in (_related(*pair, alarm) for pair in pairs) if abs(each.found) > limit]
    if wrong:
        first, limit = max(wrong, key=lambda each: abs(each[0].found) > ALIKE)
        raise Violation(
            "noise tells of other noise",
            got=f"a correlation of {first.found!r} over {first.draws} draws each",
            wanted=f"at most {limit!r}, of whatever sign",
            where=f"{first.one} against {first.other}, every rank",
            cause=partial(diagnosis.noise.of_related, [each for each, _ in wrong]),
        )


def _deviation(answer: Answer) -> float:
    step = answer.case.step
    return step.noise_multiplier * math.hypot(*answer.clip_norms) / step.normaliser


def _parts(execution: Execution, answer: Answer) -> list[_Part]:
    """By step and parameter, as shown by all ranks alike."""
    completed(execution)
    found = []
    for k, step in enumerate(answer.steps):
        shown = same_on_all_ranks(execution, k)
        require_same_form("noise is not that of every trained parameter", shown, step.used, f"step {k}, every rank")
        for name, value in shown.items():
            z = (value.double() - step.used[name].double()).flatten() / _deviation(answer)
            found += [_Part(k, name, z, len(value))] * bool(z.numel())
    return found


def _all_but_the_largest(parts: list[_Part]) -> _Part | None:
    """The draws of one step without those of its largest parameter; None where there are no others."""
    rest = sorted(parts, key=lambda part: len(part.z))[:-1]
    return _Part(rest[0].step, "", torch.cat([part.z for part in rest]), 1) if rest else None


def _scaled(part: _Part, alarm: float) -> Scaled:
    found = math.sqrt(float(part.z.square().sum()) / len(part.z))
    return Scaled(part.step, part.name, len(part.z), found, *gaussian_limits.scale_limits(len(part.z), alarm))


def _require_gaussian(part: _Part, alarm: float) -> None:
    """Raise Violation where draws of the right scale are distributed in another way."""
    n, cause = len(part.z), partial(diagnosis.noise.of_shape, part.z)
    where = f"{part}, every rank, {n} draws"
    away, limit = gaussian_limits.distance(part.z), gaussian_limits.distance_limit(n, alarm)
    if away > limit:
        raise Violation("the noise is not Gaussian", got=f"a distribution {away!r} away from the normal one",
                        wanted=f"at most {limit!r} anywhere", where=where, cause=cause)  # fmt: skip
    largest, (low, high) = float(part.z.abs().max()), gaussian_limits.largest_limits(n, alarm)
    if not low <= largest <= high:
        raise Violation("the noise is not Gaussian", got=f"{largest!r} * s C / N as the largest draw",
                        wanted=f"between {low!r} and {high!r}", where=where, cause=cause)  # fmt: skip


def _pairs(parts: Sequence[_Part], shards: int) -> Iterator[tuple[str, str, str, Tensor, Tensor]]:
    """(what two parts differ in, the one, the other, draws of the one, of the other)."""
    for one, other in itertools.combinations(parts, 2):
        apart = ["parameters"] * (one.name != other.name) + ["steps"] * (one.step != other.step)
        yield " and ".join(apart), str(one), str(other), one.z, other.z
    for part in parts:
        yield from _elements_apart(part)
        if 1 < part.rows < len(part.z):
            rows = part.z.view(part.rows, -1)
            yield "rows", f"{part}, rows 0, 2, ...", "rows 1, 3, ...", rows[::2].flatten(), rows[1::2].flatten()
    largest = max(len(part.z) for part in parts)
    for part in parts:
        shares = part.z.chunk(shards) if len(part.z) == largest else ()
        for (a, x), (b, y) in itertools.combinations(enumerate(shares), 2):
            yield "shards", f"{part}, share {a} of {shards}", f"share {b}", x, y


def _elements_apart(part: _Part) -> Iterator[tuple[str, str, str, Tensor, Tensor]]:
    """Elements i and i + 2^k whose numbers differ in bit k alone, for each k: what counts draws counts in bits."""
    for bit in range((len(part.z) - 1).bit_length()):
        apart = 1 << bit
        whole = len(part.z) // (2 * apart) * 2 * apart
        x, y = (half.flatten() for half in part.z[:whole].view(-1, 2, apart).unbind(1))
        if not bit:
            yield "elements", f"{part}, elements 0, 2, ...", "elements 1, 3, ...", x, y
        elif whole:
            yield "far elements", f"{part}, elements i", f"elements i + {apart}", x, y


def _related(kind: str, one: str, other: str, x: Tensor, y: Tensor, alarm: float) -> tuple[Related, float]:
    """(what was found, its limit)."""
    n = min(len(x), len(y))
    if not n:
        return Related(kind, one, other, 0, 0.0), 1.0
    found = gaussian_limits.correlation(x[:n], y[:n])
    return Related(kind, one, other, n, found), gaussian_limits.correlation_limit(n, alarm)
