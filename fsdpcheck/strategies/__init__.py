"""Hypothesis strategies of cases: only what an implementation accepts, by construction, never by filtering.

Every choice lists its simplest alternative first, and numbers start at 1, so that shrinking ends at the smallest model,
world and batch that still fail. An alternative that stands twice in a tuple is drawn twice as often. Hypothesis calls
the case with fewer draws the simpler one, so no simple alternative may need more draws than another: some are drawn and
then not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeVar

from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import (
    Arithmetic,
    Averaging,
    BatchLayout,
    Case,
    Clipping,
    Contribution,
    Loss,
    MeshSpec,
    NormMode,
    Numbers,
    OptimizerSpec,
    StepSpec,
    Trait,
)
from fsdpcheck.case.validation import is_power_of_two, whole_or_float
from fsdpcheck.exact.grid import premultiplies_exactly
from fsdpcheck.strategies import model as strategies_model
from fsdpcheck.strategies.model import Allowed

T = TypeVar("T")
Draw = Callable[[Features, Sequence[int]], st.SearchStrategy[Case]]
WORLD_SIZES = (1, 2, 3, 4, 5)
_LOSSES: tuple[Loss, ...] = ("mse", "linear", "hinge", "l1")
_LARGEST_BATCH = 9
_AVERAGES: tuple[Averaging, ...] = ("divide", "divide", "divide", "premultiply")
_RARELY, _OFTEN = (False, False, False, True), (False, True, True)


@st.composite
def plain_of_any_sum(draw: st.DrawFn, features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> Case:
    """``plain``, and of who averages after the sum also cases whose sums W does not divide, where they can be right.

    These are what a division before the sum rounds otherwise.
    """
    case = draw(plain(features, world_sizes))
    wanted = draw(st.booleans())  # in any case, or the simpler case would have more draws
    return _of_any_sum(case, features) if wanted else case


def plain(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Ordinary training, no clipping of any kind."""
    return cases(features, clipping=("none",), world_sizes=world_sizes)


def global_norm(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Ordinary training with ``max_grad_norm``, below and above the norms that occur."""
    return cases(features, clipping=("none",), world_sizes=world_sizes, global_norm=True)


def private_unclipped(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Per-sample clipping with C above every norm."""
    return cases(features, clipping=("unclipped",), world_sizes=world_sizes)


def private_exact(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Per-sample clipping with norms that are powers of two or stand at the threshold."""
    return cases(features, clipping=("exact",), world_sizes=world_sizes)


def private_probe(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Per-sample clipping with any C; the instrument reads the coefficients."""
    return cases(features, clipping=("probe",), world_sizes=world_sizes)


def of_equal_bits(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Plain and private steps, of each family in which the implementation promises the single device's bits."""
    private: tuple[Clipping, ...] = ("unclipped", "exact") if "exact-factors" in features.promises else ("unclipped",)
    plainly: tuple[Clipping, ...] = ("none",) if "plain" in features.promises else ()
    families = (*plainly, *(private if "private" in features.promises else ())) or ("none",)
    return cases(features, clipping=families, world_sizes=world_sizes)


def real(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Ordinary training on real numbers with the true functions, for an implementation that accepts "real"."""
    return cases(features, clipping=("none",), world_sizes=world_sizes, numbers="real")


def real_private(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """Per-sample clipping on real numbers with the true functions, any C, for one that accepts "real"."""
    return cases(features, clipping=("probe",), world_sizes=world_sizes, numbers="real")


def with_readable_updates(draw: Draw) -> Draw:
    """``draw``, but with an optimizer whose update shows its gradient: SGD without momentum and weight decay."""
    hiding: frozenset[Trait] = frozenset({"momentum", "weight-decay", "adam", "adamw"})

    def readable(features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
        return draw(replace(features, accepts=features.accepts - hiding), world_sizes)

    return readable


@st.composite
def cases(
    draw: st.DrawFn,
    features: Features,
    *,
    clipping: Sequence[Clipping] = ("none", "unclipped", "exact", "probe"),
    world_sizes: Sequence[int] = WORLD_SIZES,
    norms: Sequence[NormMode] = ("immediate", "deferred"),
    contributions: Sequence[Contribution] = ("complete", "partial", "mixed"),
    global_norm: bool = False,
    replicated: bool | None = None,
    numbers: Numbers = "grid",
    tiny_only: bool = False,
    steps: Sequence[int] = (1, 1, 1, 2, 2, 3),
    units: int = 0,
    by_unit: Sequence[bool] = _RARELY,
) -> Case:
    """Cases that ``features.accepts`` covers, in the given clipping families and world sizes.

    "deferred" norms are drawn only if promised; "partial" and "mixed" contributions only if "partial-norms" is, and
    then with a replicated batch (with distributed samples they are not computable). ``norms`` and ``contributions``
    narrow both further; ``replicated`` asks for replicated batches only, or none. If no size in ``world_sizes`` is
    within ``features.max_world_size`` there is no case. A global norm summed in float32 is asked of float32 cases only.
    ``tiny_only`` draws float32 cases, the smallest numbers and sizes, and whole normalisers.
    ``steps``: numbers of steps to draw from. ``units``: the fewest that a model is cut into, where no tied weight keeps
    layers together. ``by_unit``: whether to clip the parameters of each unit apart, to draw from where that is accepted
    and the model has units.
    With "real" ``numbers`` the true functions are drawn whether surrogates are accepted or not.
    """
    narrow = tiny_only or (global_norm and features.global_norm.dtype == "float32")
    narrow = narrow or "float64" not in features.arithmetic.dtypes
    before = features.arithmetic.averaging == "before"
    world = draw(st.sampled_from(_worlds(features, world_sizes, 24 if narrow else None)))
    shards = world // draw(st.sampled_from(_replicas(world))) if "hsdp" in features.accepts else world
    tiny = narrow or _flag(draw, "float32" in features.accepts and not (before and not _averages(world, 24)), _RARELY)
    family = draw(st.sampled_from(clipping))
    contribution = _contribution(draw, features, family, contributions)
    off_the_grid = numbers == "real" or _flag(draw, "surrogates" in features.accepts, _OFTEN)
    allowed = Allowed(frozenset(features.accepts), shards, tiny, family != "none", off_the_grid, units)
    model = strategies_model.model(draw, allowed)
    layout = _layout(draw, features.accepts, world, tiny, True if contribution != "complete" else replicated)
    step = _step(draw, features, layout, world, family, off_the_grid, draw(st.sampled_from(steps)), tiny_only)
    if before and tiny and step.reductions > 1:  # W**K leaves too few of 24 bits
        alone = {"sync_every": False} if "no-sync" in features.accepts else {"micro_batches": 1}
        step = replace(step, **alone)
    step = replace(step, contribution=contribution)
    if family != "none":
        deferred = "deferred" in features.promises
        step = replace(step, norms=draw(st.sampled_from([n for n in norms if n == "immediate" or deferred])))
        apart = "per-layer-clipping" in features.accepts and numbers == "grid" and bool(model.units)
        step = replace(step, clip_groups="units" if _flag(draw, apart, by_unit) else "all")
    if global_norm:
        step = replace(step, max_grad_norm=2.0 ** draw(st.integers(-1, 8)))
    reshard = not _flag(draw, "keep-unsharded" in features.accepts)
    project = "project" in features.accepts and numbers == "grid" and not _stays_exact(step, family, tiny)
    arithmetic = replace(_arithmetic(draw, tiny, project), numbers=numbers)
    arithmetic = replace(arithmetic, world_factors=step.reductions if before else 1)
    if "premultiply" in features.accepts and family != "probe" and _premultiplies(arithmetic, shards, world):
        arithmetic = replace(arithmetic, averaging=draw(st.sampled_from(_AVERAGES)))
    return Case(
        model=model,
        mesh=MeshSpec(dp_shard=shards, dp_replicate=world // shards, reshard_after_forward=reshard),
        layout=layout,
        step=step,
        arithmetic=arithmetic,
        seed=draw(st.integers(0, (1 << 32) - 1)),
    )


def _replicas(world: int) -> list[int]:
    """Numbers of replicas that ``world`` ranks can be, one replica thrice, and those that make a 2-D mesh."""
    between = [count for count in range(2, world) if world % count == 0]
    return [1, 1, 1, *between, *between, *between, *([world] if world > 1 else [])]


def _contribution(
    draw: st.DrawFn, features: Features, family: Clipping, wanted: Sequence[Contribution]
) -> Contribution:
    possible = family != "none" and "partial-norms" in features.promises and "replicated" in features.accepts
    kinds = [kind for kind in wanted for _ in range(20 if kind == "complete" else possible)]
    return draw(st.sampled_from(kinds))


def _layout(draw: st.DrawFn, accepts: frozenset[Trait], world: int, tiny: bool, replicated: bool | None) -> BatchLayout:
    largest = 4 if tiny else _LARGEST_BATCH
    kinds = ["contiguous", "strided", "sampler", "sampler", "sampler drop_last"]
    kinds += ["ragged"] * 4 if "ragged" in accepts else []
    kinds += ["replicated"] if replicated is None and ("replicated" in accepts or world == 1) else []
    kind = draw(st.sampled_from(kinds))
    if replicated or kind == "replicated":
        return BatchLayout("replicated", draw(st.integers(1, largest)))
    if kind == "ragged":
        return _ragged(draw, world, 2 if tiny else 4, "empty-rank" in accepts)
    sizes = _batch_sizes(accepts, world, largest, kind)
    if kind.startswith("sampler"):
        drop_last = kind == "sampler drop_last"
        return BatchLayout("sampler", draw(st.sampled_from(sizes)), shuffle=_flag(draw, True), drop_last=drop_last)
    return BatchLayout("strided" if kind == "strided" else "contiguous", draw(st.sampled_from(sizes)))


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
    return strategies_model.drawable(sizes + [size for size in sizes if size % world] or [world])


def _ragged(draw: st.DrawFn, world: int, largest: int, empty: bool) -> BatchLayout:
    counts = draw(st.lists(st.integers(0 if empty else 1, largest), min_size=world, max_size=world))
    if not any(counts):
        counts[0] = 1
    return BatchLayout("ragged", sum(counts), counts=tuple(counts))


def _step(
    draw: st.DrawFn,
    features: Features,
    layout: BatchLayout,
    world: int,
    family: Clipping,
    off_the_grid: bool,
    steps: int,
    whole: bool,
) -> StepSpec:
    accepts, sizes = features.accepts, layout.local_sizes(world)
    optimizer = _optimizer(draw, accepts, steps)
    losses = (*_LOSSES, "cross_entropy") if off_the_grid else _LOSSES
    step = StepSpec(draw(st.sampled_from(losses)), steps, clipping=family, optimizer=optimizer)
    step = replace(step, resume=_flag(draw, "resume" in accepts and steps > 1, _RARELY))
    if family in ("exact", "probe"):
        step = replace(step, clip_norm=_clip_norm(draw, family))
    mean = _flag(draw, "mean" in accepts and family == "none", _RARELY)
    powers = (1, 2, 4, 8)
    times_world = tuple(world * power for power in powers[:3])
    parts = 1 if layout.kind == "replicated" else world
    normalisers: tuple[int | float, ...] = powers if layout.kind == "replicated" else (*powers, *times_world)
    if features.arithmetic.divides_by_share and not is_power_of_two(world):
        normalisers = times_world
    if "fractional-normaliser" in accepts and not whole:
        normalisers += (whole_or_float(Fraction(parts, 2)),) * 2
    step = replace(step, normaliser=draw(st.sampled_from(normalisers)))
    several = _flag(draw, "micro-batches" in accepts, _OFTEN)
    if mean and len(set(sizes)) == 1 and is_power_of_two(sizes[0]) and layout.kind != "replicated":
        return replace(step, reduction="mean", normaliser=world * sizes[0])
    most = 3 if "empty-rank" in accepts else min(3, *sizes)
    if most < 2 or not several:
        return step
    sync_every = not _flag(draw, "no-sync" in accepts)
    return replace(step, micro_batches=draw(st.integers(2, most)), sync_every=sync_every)


def _clip_norm(draw: st.DrawFn, family: Clipping) -> int:
    """C in units of the loss scale: a power of two where norms are, otherwise any number."""
    return 1 << draw(st.integers(0, 5)) if family == "exact" else draw(st.sampled_from((1, 1, 2, 2, 3, 5, 7, 12)))


def _optimizer(draw: st.DrawFn, accepts: frozenset[Trait], steps: int) -> OptimizerSpec:
    chosen = draw(st.sampled_from(_optimizers(accepts)))
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
    return found + [OptimizerSpec("adam", weight_decay=d) for d in decays if "adam" in accepts]


def _arithmetic(draw: st.DrawFn, tiny: bool, project: bool) -> Arithmetic:
    """float32 has 24 bits to spend, so its cases draw the smallest integers."""
    weights, inputs = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Arithmetic("float32", project=project) if tiny else Arithmetic("float64", weights, inputs, project)


def _stays_exact(step: StepSpec, family: Clipping, tiny: bool) -> bool:
    """Whether nearly all such cases are exact in every step without a projection.

    Then there is none: it would heal a rank that trains other parameters than it shows, before they can have an effect.
    """
    plain = step.optimizer.kind == "sgd" and not step.optimizer.momentum and not step.optimizer.weight_decay
    return step.steps == 1 or (step.steps == 2 and plain and family in ("none", "unclipped") and not tiny)


def _premultiplies(arithmetic: Arithmetic, shards: int, world: int) -> bool:
    """Whether an average that multiplies by 1/W before it adds is exact over each axis of the mesh, and over both."""
    precision = {"float64": 53, "float32": 24}[arithmetic.dtype]
    return all(premultiplies_exactly(size, precision) for size in (shards, world // shards, world))


def _of_any_sum(case: Case, features: Features) -> Case:
    """The case with losses that do not carry W, and N a multiple of W, if its one average is the only rounding."""
    step, arithmetic = case.step, case.arithmetic
    rounds_once = step.reductions == 1 and case.mesh.dp_replicate == 1 and arithmetic.averaging == "divide"
    stays = step.steps == 1 or arithmetic.project  # otherwise the second step starts off the grid
    if features.arithmetic.averaging == "before" or is_power_of_two(case.world_size) or not (rounds_once and stays):
        return case
    if case.layout.kind != "replicated" and is_power_of_two(step.normaliser):
        step = replace(step, normaliser=whole_or_float(Fraction(step.normaliser) * case.world_size))
    return replace(case, step=step, arithmetic=replace(arithmetic, world_factors=0))


def _worlds(features: Features, world_sizes: Sequence[int], precision: int | None) -> list[int]:
    """The numbers of ranks within the adapter's limit, and those on which it averages exactly, if there are such.

    ``precision``: bits of the arithmetic where it is fixed before the ranks are drawn.
    """
    limit = features.max_world_size or max(world_sizes)
    sizes = [size for size in world_sizes if size <= limit]
    exact = [size for size in sizes if features.arithmetic.averaging == "after" or _averages(size, precision or 53)]
    return exact or sizes


def _averages(world: int, precision: int) -> bool:
    """Whether multiples of the number of ranks, and of the sizes of all its meshes' axes, times 1/W are exact."""
    return all(premultiplies_exactly(size, precision) for size in range(1, world + 1) if world % size == 0)


def _flag(draw: st.DrawFn, allowed: bool, odds: Sequence[bool] = (False, True)) -> bool:
    """False if not allowed, else one of ``odds``; False is the simpler."""
    return allowed and draw(st.sampled_from(odds))
