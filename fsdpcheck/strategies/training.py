"""Drawing the cases that train: of a space, what an implementation accepts, by construction and never by filtering.

Every choice lists its simplest alternative first, and numbers start at 1, so that shrinking ends at the smallest model,
world and batch that still fail. An alternative that stands twice in a tuple is drawn twice as often. Hypothesis calls
the case with fewer draws the simpler one, so no simple alternative may need more draws than another: some are drawn and
then not used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import get_args

from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import (
    Arithmetic,
    Averaging,
    BatchLayout,
    Clipping,
    Contribution,
    Loss,
    MeshSpec,
    ModelSpec,
    Numbers,
    OptimizerSpec,
    StepSpec,
    TrainingCase,
    Trait,
)
from fsdpcheck.case.axes import ModelAxis
from fsdpcheck.case.validation import is_power_of_two, whole_or_float
from fsdpcheck.exact.grid import premultiplies_exactly
from fsdpcheck.strategies import model as models
from fsdpcheck.strategies import rare_variants
from fsdpcheck.strategies.choice import among
from fsdpcheck.strategies.model import Allowed
from fsdpcheck.strategies.space import CaseSpace

_LOSSES: tuple[Loss, ...] = ("mse", "linear", "hinge", "l1")
_LARGEST_BATCH = 9
_AVERAGES: tuple[Averaging, ...] = ("divide", "divide", "divide", "premultiply")
_RARELY, _OFTEN = (False, False, False, True), (False, True, True)


@dataclass(frozen=True)
class _Outline:
    """What is drawn of a case first, because the rest depends on it.

    ``tiny``: 24 bits are all there are. ``off_the_grid``: functions whose values are no dyadic numbers may be drawn.
    """

    mesh: MeshSpec
    tiny: bool
    family: Clipping
    contribution: Contribution
    numbers: Numbers
    off_the_grid: bool

    @property
    def world(self) -> int:
        return self.mesh.world_size


@st.composite
def cases(draw: st.DrawFn, space: CaseSpace, features: Features, world_sizes: Sequence[int]) -> TrainingCase:
    """Cases of ``space`` that ``features.accepts`` covers, on one of these numbers of ranks.

    If no size in ``world_sizes`` is within ``features.max_world_size`` there is no case. A global norm summed in
    float32 is asked of float32 cases only.
    """
    outline = _outline(draw, space, features, world_sizes)
    model = _model(draw, space, features, outline)
    layout = _layout(draw, space, features, outline)
    step = _step(draw, space, features, outline, layout, bool(model.units))
    reshard = not _flag(draw, "keep-unsharded" in features.accepts)
    case = TrainingCase(
        model=model,
        mesh=replace(outline.mesh, reshard_after_forward=reshard),
        layout=layout,
        step=step,
        arithmetic=_arithmetic(draw, features, outline, step),
        seed=draw(st.integers(0, (1 << 32) - 1)),
    )
    variants = rare_variants.variants(case, features, space.steps)
    return variants[draw(among(range(len(variants))))]()


def _outline(draw: st.DrawFn, space: CaseSpace, features: Features, world_sizes: Sequence[int]) -> _Outline:
    accepts = features.accepts
    narrow = space.tiny_only or (space.global_norm and features.global_norm.dtype == "float32")
    narrow = narrow or "float64" not in features.arithmetic.dtypes
    mesh = drawn_mesh(draw, features, _worlds(features, world_sizes, 24 if narrow else None))
    before = features.arithmetic.averaging == "before"
    possible = "float32" in accepts and not (before and not _averages(mesh.world_size, 24))
    tiny = narrow or _flag(draw, possible, _RARELY)
    family = draw(among(space.families(features)))
    contribution = _contribution(draw, features, family, space.contributions)
    numbers = space.numbers_for(features)
    off_the_grid = numbers == "real" or _flag(draw, "surrogates" in accepts, _OFTEN)
    return _Outline(mesh, tiny, family, contribution, numbers, off_the_grid)


def drawn_mesh(draw: st.DrawFn, features: Features, worlds: Sequence[int]) -> MeshSpec:
    """A mesh of one of these numbers of ranks, of the axes that ``features`` has."""
    world = draw(among(worlds))
    axes = tuple(_model_axes(draw, features, world))
    data = world // math.prod(size for _, size in axes)
    replicas = draw(among(_replicas(data))) if "hsdp" in features.accepts else 1
    return MeshSpec(dp_shard=data // replicas, dp_replicate=replicas, axes=axes)


def _model_axes(draw: st.DrawFn, features: Features, world: int) -> Iterator[tuple[ModelAxis, int]]:
    """The axes that share out the model, those of several ranks; all of the ranks where no samples are dealt out."""
    axes = [axis for axis in get_args(ModelAxis) if axis in features.axes]
    deals = not features.axes.isdisjoint(("dp_shard", "dp_replicate"))
    left = world
    for place, axis in enumerate(axes):
        alone = place == len(axes) - 1 and not deals
        size = left if alone else draw(among([left, *(n for n in range(1, left) if left % n == 0)]))
        left //= size
        if size > 1:
            yield axis, size


def _replicas(world: int) -> list[int]:
    """Numbers of replicas that ``world`` ranks can be, one replica thrice, and those that make a 2-D mesh."""
    between = [count for count in range(2, world) if world % count == 0]
    return [1, 1, 1, *between, *between, *between, *([world] if world > 1 else [])]


def _contribution(
    draw: st.DrawFn, features: Features, family: Clipping, wanted: Sequence[Contribution]
) -> Contribution:
    possible = family != "none" and "partial-norms" in features.promises and "replicated" in features.accepts
    kinds = [kind for kind in wanted for _ in range(20 if kind == "complete" else possible)]
    return draw(among(kinds))


def _model(draw: st.DrawFn, space: CaseSpace, features: Features, outline: _Outline) -> ModelSpec:
    private, shards = outline.family != "none", outline.mesh.row_ranks
    grid = outline.numbers == "grid"
    allowed = Allowed(features.accepts, shards, outline.tiny, private, outline.off_the_grid, space.units, grid)
    return models.model(draw, allowed)


def _layout(draw: st.DrawFn, space: CaseSpace, features: Features, outline: _Outline) -> BatchLayout:
    accepts, world, tiny = features.accepts, outline.mesh.data_ranks, outline.tiny
    replicated = True if outline.contribution != "complete" else space.replicated
    largest = 4 if tiny else _LARGEST_BATCH
    kinds = ["contiguous", "strided", "sampler", "sampler", "sampler drop_last"]
    kinds += ["ragged"] * 4 if "ragged" in accepts else []
    kinds += ["replicated"] if replicated is None and ("replicated" in accepts or world == 1) else []
    kind = draw(among(kinds))
    if replicated or kind == "replicated":
        return BatchLayout("replicated", draw(st.integers(1, largest)))
    if kind == "ragged":
        return _ragged(draw, world, 2 if tiny else 4, "empty-rank" in accepts)
    sizes = _batch_sizes(accepts, world, largest, kind)
    if kind.startswith("sampler"):
        drop_last = kind == "sampler drop_last"
        return BatchLayout("sampler", draw(among(sizes)), shuffle=_flag(draw, True), drop_last=drop_last)
    return BatchLayout("strided" if kind == "strided" else "contiguous", draw(among(sizes)))


def _batch_sizes(accepts: frozenset[Trait], world: int, largest: int, kind: str) -> list[int]:
    """Sizes B of a logical batch that give only accepted shares, uneven ones twice; every step has a sample."""
    sizes = [size for size in range(1, largest + 1)]
    if kind == "sampler":
        sizes = [size for size in sizes if "wrap-around" in accepts or size % world == 0]
    elif kind == "sampler drop_last":
        sizes = [size for size in sizes if size >= world]
    else:
        sizes = [size for size in sizes if "ragged" in accepts or size % world == 0]
        sizes = [size for size in sizes if "empty-rank" in accepts or size >= world]
    return models.drawable(sizes + [size for size in sizes if size % world] or [world])


def _ragged(draw: st.DrawFn, world: int, largest: int, empty: bool) -> BatchLayout:
    counts = draw(st.lists(st.integers(0 if empty else 1, largest), min_size=world, max_size=world))
    if not any(counts):
        counts[0] = 1
    return BatchLayout("ragged", sum(counts), counts=tuple(counts))


def _step(
    draw: st.DrawFn, space: CaseSpace, features: Features, outline: _Outline, layout: BatchLayout, has_units: bool
) -> StepSpec:
    accepts, family = features.accepts, outline.family
    steps = draw(among(space.steps))
    narrow = space.global_norm or outline.tiny or family != "none" or outline.numbers != "grid"
    optimizer = _optimizer(draw, accepts - {"matrix-optimizer", "row-optimizer"} if narrow else accepts, steps)
    losses = (*_LOSSES, "cross_entropy") if outline.off_the_grid else _LOSSES
    step = StepSpec(draw(among(losses)), steps, clipping=family, optimizer=optimizer)
    step = replace(step, resume=_flag(draw, "resume" in accepts and steps > 1, _RARELY))
    if family in ("exact", "probe"):
        step = replace(step, clip_norm=_clip_norm(draw, family))
    step = _reduced(draw, space, features, outline, layout, step)
    if features.arithmetic.averaging == "before" and outline.tiny and step.reductions > 1:
        # W**K leaves too few of 24 bits, unless it is a power of two
        if "no-sync" in accepts:
            step = replace(step, sync_every=False)
        elif not is_power_of_two(outline.mesh.data_ranks):
            step = replace(step, micro_batches=1)
    step = replace(step, contribution=outline.contribution)
    if family != "none":
        norms = [norms for norms in space.norms if norms == "immediate" or "deferred" in features.promises]
        step = replace(step, norms=draw(among(norms)))
        apart = "per-layer-clipping" in accepts and outline.numbers == "grid" and has_units
        step = replace(step, clip_groups="units" if _flag(draw, apart, space.by_unit) else "all")
    return replace(step, max_grad_norm=2.0 ** draw(st.integers(-1, 8))) if space.global_norm else step


def _reduced(
    draw: st.DrawFn, space: CaseSpace, features: Features, outline: _Outline, layout: BatchLayout, step: StepSpec
) -> StepSpec:
    """The step with a sum or mean, a normaliser and micro-batches that its shares allow."""
    accepts, world = features.accepts, outline.mesh.data_ranks
    sizes = layout.local_sizes(world)
    mean = _flag(draw, "mean" in accepts and outline.family == "none", _RARELY)
    step = replace(step, normaliser=draw(among(_normalisers(space, features, world, layout))))
    several = _flag(draw, "micro-batches" in accepts, _OFTEN)
    if mean and len(set(sizes)) == 1 and is_power_of_two(sizes[0]) and layout.kind != "replicated":
        return replace(step, reduction="mean", normaliser=world * sizes[0])
    most = 3 if "empty-rank" in accepts else min(3, *sizes)
    if most < 2 or not several:
        return step
    sync_every = not _flag(draw, "no-sync" in accepts)
    return replace(step, micro_batches=draw(st.integers(2, most)), sync_every=sync_every)


def _normalisers(space: CaseSpace, features: Features, world: int, layout: BatchLayout) -> tuple[int | float, ...]:
    powers, replicated = (1, 2, 4, 8), layout.kind == "replicated"
    times_world = tuple(world * power for power in powers[:3])
    normalisers: tuple[int | float, ...] = powers if replicated else (*powers, *times_world)
    if features.arithmetic.divides_by_share and not is_power_of_two(world):
        normalisers = times_world
    if "fractional-normaliser" in features.accepts and not space.tiny_only:
        normalisers += (whole_or_float(Fraction(1 if replicated else world, 2)),) * 2
    return normalisers


def _clip_norm(draw: st.DrawFn, family: Clipping) -> int:
    """C in units of the loss scale: a power of two where norms are, otherwise any number."""
    return 1 << draw(st.integers(0, 5)) if family == "exact" else draw(among((1, 1, 2, 2, 3, 5, 7, 12)))


def _optimizer(draw: st.DrawFn, accepts: frozenset[Trait], steps: int) -> OptimizerSpec:
    chosen = draw(among(_optimizers(accepts)))
    chosen = replace(chosen, lr_exponent=draw(st.integers(0, 3)))
    halving = _flag(draw, "schedule" in accepts and steps > 1, _RARELY)
    return replace(chosen, schedule="halving") if halving else chosen


def _optimizers(accepts: Collection[Trait]) -> list[OptimizerSpec]:
    """Plain SGD three times, then every accepted combination."""
    found = [OptimizerSpec()] * 3
    momenta = [0.0, 0.5] if "momentum" in accepts else [0.0]
    decays = [0.0, 0.5] if "weight-decay" in accepts else [0.0]
    found += [OptimizerSpec(momentum=m, weight_decay=d) for m in momenta for d in decays if m or d]
    found += [OptimizerSpec("adamw", weight_decay=d) for d in decays if "adamw" in accepts]
    found += [OptimizerSpec("adam", weight_decay=d) for d in decays if "adam" in accepts]
    found += [OptimizerSpec("row_scaled")] * ("row-optimizer" in accepts)
    return found + [OptimizerSpec("newton_schulz")] * ("matrix-optimizer" in accepts)


def _arithmetic(draw: st.DrawFn, features: Features, outline: _Outline, step: StepSpec) -> Arithmetic:
    """float32 has 24 bits to spend, so its cases draw the smallest integers."""
    accepts, family, tiny = features.accepts, outline.family, outline.tiny
    weights, inputs = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    project = (
        "project" in accepts
        and outline.numbers == "grid"
        and not rare_variants.stays_exact(step, "float32" if tiny else "float64")
    )
    arithmetic = Arithmetic("float32" if tiny else "float64", project=project, numbers=outline.numbers)
    arithmetic = arithmetic if tiny else replace(arithmetic, weights=weights, inputs=inputs)
    before = features.arithmetic.averaging == "before"
    arithmetic = replace(arithmetic, world_factors=step.reductions if before else 1)
    if "premultiply" in accepts and family != "probe" and _premultiplies(arithmetic, outline.mesh):
        arithmetic = replace(arithmetic, averaging=draw(among(_AVERAGES)))
    return arithmetic


def _premultiplies(arithmetic: Arithmetic, mesh: MeshSpec) -> bool:
    """Whether an average that multiplies by 1/W before it adds is exact over each axis of the mesh, and over both."""
    precision = {"float64": 53, "float32": 24}[arithmetic.dtype]
    return all(premultiplies_exactly(size, precision) for size in (mesh.dp_shard, mesh.dp_replicate, mesh.data_ranks))


def _worlds(features: Features, world_sizes: Sequence[int], precision: int | None) -> list[int]:
    """The numbers of ranks within the adapter's limit, and those on which it averages exactly, if there are such.

    ``precision``: bits of the arithmetic where it is fixed before the ranks are drawn.
    """
    limit = features.max_world_size or max(world_sizes)
    sizes = [size for size in world_sizes if size <= limit]
    exact = [size for size in sizes if features.arithmetic.averaging != "before" or _averages(size, precision or 53)]
    return exact or sizes


def _averages(world: int, precision: int) -> bool:
    """Whether multiples of the number of ranks, and of the sizes of all its meshes' axes, times 1/W are exact."""
    return all(premultiplies_exactly(size, precision) for size in range(1, world + 1) if world % size == 0)


def _flag(draw: st.DrawFn, allowed: bool, odds: Sequence[bool] = (False, True)) -> bool:
    """False if not allowed, else one of ``odds``; False is the simpler."""
    return allowed and draw(among(odds))
