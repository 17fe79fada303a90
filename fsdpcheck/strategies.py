"""Hypothesis strategies of cases: only what an implementation accepts, by construction, never by filtering.

Every choice lists its simplest alternative first, and numbers start at 1, so that shrinking ends at the smallest model,
world and batch that still fail. An alternative that stands twice in a tuple is drawn twice as often. Hypothesis calls
the case with fewer draws the simpler one, so no simple alternative may need more draws than another: some are drawn and
then not used.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TypeVar

from hypothesis import strategies as st

from fsdpcheck.adapters._base import Features
from fsdpcheck.case import (
    Activation,
    Arithmetic,
    BatchLayout,
    Case,
    Clipping,
    Contribution,
    Freeze,
    InputKind,
    LayerSpec,
    Loss,
    MeshSpec,
    ModelSpec,
    NormMode,
    OptimizerSpec,
    StepSpec,
    Trait,
)
from fsdpcheck.case_rules import is_power_of_two
from fsdpcheck.case_shapes import item_units

T = TypeVar("T")
Draw = Callable[[Features, Sequence[int]], st.SearchStrategy[Case]]
WORLD_SIZES = (1, 2, 3, 4, 5)
_ACTIVATIONS: tuple[Activation, ...] = ("identity", "relu", "leaky_relu", "hardtanh", "abs")
_LOSSES: tuple[Loss, ...] = ("mse", "linear", "hinge", "l1")
_LARGEST_WIDTH, _LARGEST_BATCH = 7, 9
_RARELY, _OFTEN = (False, False, False, True), (False, True, True)


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


def with_readable_updates(draw: Draw) -> Draw:
    """``draw``, but with an optimizer whose update shows its gradient: SGD without momentum and weight decay."""
    hiding: frozenset[Trait] = frozenset({"momentum", "weight-decay", "adamw"})

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
) -> Case:
    """Cases that ``features.accepts`` covers, in the given clipping families and world sizes.

    "deferred" norms are drawn only if promised; "partial" and "mixed" contributions only if "partial-norms" is, and
    then with a replicated batch (with distributed samples they are not computable). ``norms`` and ``contributions``
    narrow both further; ``replicated`` asks for replicated batches only, or none. If no size in ``world_sizes`` is
    within ``features.max_world_size`` there is no case. A global norm summed in float32 is asked of float32 cases only.
    """
    limit = features.max_world_size or max(world_sizes)
    world = draw(st.sampled_from([size for size in world_sizes if size <= limit]))
    shards = world // draw(st.sampled_from(_replicas(world))) if "hsdp" in features.accepts else world
    narrow = global_norm and features.global_norm.dtype == "float32"
    tiny = narrow or _flag(draw, "float32" in features.accepts, _RARELY)
    family = draw(st.sampled_from(clipping))
    contribution = _contribution(draw, features, family, contributions)
    tie = ("tied" if family == "none" else "tied-private") in features.accepts
    model = _model(draw, features.accepts, shards, tiny, tie)
    layout = _layout(draw, features.accepts, world, tiny, True if contribution != "complete" else replicated)
    step = _step(draw, features, layout, world, family)
    step = replace(step, contribution=contribution)
    if family != "none":
        deferred = "deferred" in features.promises
        step = replace(step, norms=draw(st.sampled_from([n for n in norms if n == "immediate" or deferred])))
    if global_norm:
        step = replace(step, max_grad_norm=2.0 ** draw(st.integers(-1, 8)))
    reshard = not _flag(draw, "keep-unsharded" in features.accepts)
    return Case(
        model=model,
        mesh=MeshSpec(dp_shard=shards, dp_replicate=world // shards, reshard_after_forward=reshard),
        layout=layout,
        step=step,
        arithmetic=_arithmetic(draw, tiny, project=step.steps > 1 and "project" in features.accepts),
        seed=draw(st.integers(0, (1 << 32) - 1)),
    )


def _replicas(world: int) -> list[int]:
    """Numbers of replicas that ``world`` ranks can be, one replica thrice."""
    return [1, 1, *(count for count in range(1, world + 1) if world % count == 0)]


def _contribution(
    draw: st.DrawFn, features: Features, family: Clipping, wanted: Sequence[Contribution]
) -> Contribution:
    possible = family != "none" and "partial-norms" in features.promises and "replicated" in features.accepts
    kinds = [kind for kind in wanted for _ in range(20 if kind == "complete" else possible)]
    return draw(st.sampled_from(kinds))


def _model(draw: st.DrawFn, accepts: frozenset[Trait], shards: int, tiny: bool, tie: bool) -> ModelSpec:
    depth = draw(st.sampled_from((1, 2) if tiny else (1, 2, 2, 3, 3)))
    rows = _row_counts(accepts, shards, 3 if tiny else _LARGEST_WIDTH)
    kind = draw(st.sampled_from(_input_kinds(accepts)))
    balanced = [width for width in (2, 4) if width in rows]
    layer_norm = kind != "tokens" and _flag(draw, "layer-norm" in accepts and bool(balanced))
    pairs = _tied_pairs(depth, kind) if tie else []
    tied = bool(pairs) and _flag(draw, True, _RARELY)
    widths = balanced if layer_norm else rows if tied else range(1, 4 if tiny else _LARGEST_WIDTH + 1)
    features = draw(st.sampled_from(widths))
    several = [count for count in rows if count > 1] or [2 * shards]
    vocabulary = draw(st.sampled_from(several)) if kind == "tokens" else 2
    layers = tuple(_layer(draw, accepts, rows) for _ in range(depth))
    spec = ModelSpec(
        layers,
        input=kind,
        features=features,
        length=draw(st.integers(1, 2 if tiny else 4)) if kind != "vector" else 1,
        vocabulary=vocabulary,
        padding_idx=_padding(draw, accepts, vocabulary) if kind == "tokens" else None,
        layer_norm=layer_norm,
    )
    if tied:
        spec = _tie(spec, draw(st.sampled_from(pairs)))
    spec = _thawed(spec)
    return replace(spec, units=draw(st.sampled_from(_groupings(spec, "root-parameters" in accepts))))


def _row_counts(accepts: frozenset[Trait], shards: int, largest: int) -> list[int]:
    """Sizes of dim 0 a weight may have; never none."""
    counts = [count for count in range(1, largest + 1) if "uneven-rows" in accepts or count % shards == 0]
    return [count for count in counts if "rows<ranks" in accepts or count >= shards] or [shards]


def _input_kinds(accepts: frozenset[Trait]) -> list[InputKind]:
    kinds: list[InputKind] = ["vector"]
    if "sequence" in accepts:
        kinds += ["sequence", "tokens"] if "tokens" in accepts else ["sequence"]
    return kinds


def _padding(draw: st.DrawFn, accepts: frozenset[Trait], vocabulary: int) -> int | None:
    return draw(st.integers(0, vocabulary - 1)) if _flag(draw, "padding_idx" in accepts) else None


def _layer(draw: st.DrawFn, accepts: frozenset[Trait], rows: Sequence[int]) -> LayerSpec:
    width = draw(st.sampled_from(rows))
    bias = _flag(draw, "bias" in accepts)
    activation = draw(st.sampled_from(_ACTIVATIONS))
    kinds: list[Freeze] = ["none", "none", "none", "none", "weight"]
    kinds += ["bias", "all"] if bias else []
    frozen = draw(st.sampled_from(kinds)) if "frozen" in accepts else "none"
    return LayerSpec(width, bias, activation, frozen)


def _tied_pairs(depth: int, kind: InputKind) -> list[tuple[int, int]]:
    first = -1 if kind == "tokens" else 0
    return [(a, b) for b in range(depth) for a in range(first, b)]


def _tie(spec: ModelSpec, pair: tuple[int, int]) -> ModelSpec:
    """``spec`` with the second layer given the shape of the first (rows among those already drawn), none frozen."""
    first, second = pair
    widths = [spec.features, *(layer.width for layer in spec.layers)]
    widths[second] = widths[max(first, 0)]
    widths[second + 1] = spec.vocabulary if first < 0 else widths[first + 1]
    layers = [replace(layer, width=width) for layer, width in zip(spec.layers, widths[1:], strict=True)]
    for index in {first, second} - {-1}:
        layers[index] = replace(layers[index], frozen="none")
    return replace(spec, layers=tuple(layers), tied=pair)


def _thawed(spec: ModelSpec) -> ModelSpec:
    """``spec`` with its last layer trained, if otherwise the whole body were frozen."""
    frozen = [layer.frozen == "all" or (layer.frozen == "weight" and not layer.bias) for layer in spec.layers]
    if spec.has_front or not all(frozen):
        return spec
    return replace(spec, layers=(*spec.layers[:-1], replace(spec.layers[-1], frozen="none")))


def _groupings(spec: ModelSpec, to_root: bool) -> list[tuple[int, ...]]:
    """Ways to group the layers into units, fewest units first; those with several units stand thrice."""
    items = len(spec.layers) + spec.has_front
    totals = range(items + 1) if to_root else [items]
    found = sorted((sizes for total in totals for sizes in _compositions(total)), key=len)
    if spec.tied is not None:
        found = [sizes for sizes in found if _together(spec, sizes)]
    return found + [sizes for sizes in found if len(sizes) > 1] * 2


def _compositions(total: int) -> list[tuple[int, ...]]:
    """The ordered ways to write ``total`` as a sum of positive integers."""
    if not total:
        return [()]
    return [(head, *tail) for head in range(total, 0, -1) for tail in _compositions(total - head)]


def _together(spec: ModelSpec, sizes: tuple[int, ...]) -> bool:
    """Whether the two tied layers stand in one unit."""
    assert spec.tied is not None
    units = item_units(replace(spec, units=sizes))
    return units[spec.tied[0] + spec.has_front] == units[spec.tied[1] + spec.has_front]


def _layout(draw: st.DrawFn, accepts: frozenset[Trait], world: int, tiny: bool, replicated: bool | None) -> BatchLayout:
    largest = 4 if tiny else _LARGEST_BATCH
    kinds = ["contiguous", "strided", "sampler", "sampler", "sampler drop_last"]
    kinds += ["ragged"] * 3 if "ragged" in accepts else []
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
    return sizes + [size for size in sizes if size % world] or [world]


def _ragged(draw: st.DrawFn, world: int, largest: int, empty: bool) -> BatchLayout:
    counts = draw(st.lists(st.integers(0 if empty else 1, largest), min_size=world, max_size=world))
    if not any(counts):
        counts[0] = 1
    return BatchLayout("ragged", sum(counts), counts=tuple(counts))


def _step(draw: st.DrawFn, features: Features, layout: BatchLayout, world: int, family: Clipping) -> StepSpec:
    accepts, sizes = features.accepts, layout.local_sizes(world)
    steps = draw(st.sampled_from((1, 1, 1, 2, 2, 3)))
    optimizer = draw(st.sampled_from(_optimizers(accepts)))
    optimizer = replace(optimizer, lr_exponent=draw(st.integers(0, 3)))
    step = StepSpec(draw(st.sampled_from(_LOSSES)), steps, clipping=family, optimizer=optimizer)
    if family in ("exact", "probe"):
        step = replace(step, clip_norm=_clip_norm(draw, family))
    mean = _flag(draw, "mean" in accepts and family == "none", _RARELY)
    powers = (1, 2, 4, 8)
    normalisers = powers if layout.kind == "replicated" else (*powers, *(world * power for power in powers[:3]))
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


def _optimizers(accepts: Collection[Trait]) -> list[OptimizerSpec]:
    """Plain SGD three times, then every accepted combination."""
    found = [OptimizerSpec()] * 3
    momenta = [0.0, 0.5] if "momentum" in accepts else [0.0]
    decays = [0.0, 0.5] if "weight-decay" in accepts else [0.0]
    found += [OptimizerSpec(momentum=m, weight_decay=d) for m in momenta for d in decays if m or d]
    return found + [OptimizerSpec("adamw", weight_decay=d) for d in decays if "adamw" in accepts]


def _arithmetic(draw: st.DrawFn, tiny: bool, project: bool) -> Arithmetic:
    """float32 has 24 bits to spend, so its cases draw the smallest integers."""
    weights, inputs = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Arithmetic("float32", project=project) if tiny else Arithmetic("float64", weights, inputs, project)


def _flag(draw: st.DrawFn, allowed: bool, odds: Sequence[bool] = (False, True)) -> bool:
    """False if not allowed, else one of ``odds``; False is the simpler."""
    return allowed and draw(st.sampled_from(odds))
