"""Drawing the model of a case: only what an implementation accepts, simplest alternatives first (see strategies)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hypothesis import strategies as st

from fsdpcheck.case import Activation, Freeze, InputKind, LayerSpec, ModelSpec, Trait
from fsdpcheck.case.model import Bags, Mask, PaddingMode
from fsdpcheck.case.shapes import SPATIAL, Shape, body_input, body_output, item_units
from fsdpcheck.strategies.choice import among

LARGEST_WIDTH = 7
POLYNOMIAL: tuple[Activation, ...] = ("identity", "relu", "leaky_relu", "hardtanh", "abs")
OFF_THE_GRID: tuple[Activation, ...] = ("gelu", "silu", "tanh", "sigmoid", "softmax")
_RARELY, _EVENLY = (False, False, False, True), (False, True)
_PRIVATE_NAMES: frozenset[Trait] = frozenset({"tied", "conv", "group-norm", "rms-norm", "attention", "bags"})
_WIDEST_ROW = 16
"""Longest row that a normalisation behind a Flatten is drawn for."""


@dataclass(frozen=True)
class Allowed:
    """What a model may hold. ``shards``: ranks a parameter is cut for. ``tiny``: sizes for 24 bits.

    ``private``: norm rules are needed. ``off_the_grid``: functions whose values are no dyadic numbers may be drawn.
    ``units``: the fewest. ``grid``: numbers are on one, so that what rounding may bring below zero is nowhere.
    """

    accepts: frozenset[Trait]
    shards: int
    tiny: bool
    private: bool
    off_the_grid: bool
    units: int = 0
    grid: bool = True

    def has(self, trait: Trait) -> bool:
        """Whether ``trait`` is accepted, in its private form if the case is private and it has one."""
        return (f"{trait}-private" if self.private and trait in _PRIVATE_NAMES else trait) in self.accepts

    def has_form(self, trait: str) -> bool:
        """Whether a form of a layer is accepted that asks for more in private training alone."""
        return not self.private or f"{trait}-private" in self.accepts

    def fits(self, rows: int) -> bool:
        """Whether a weight may have this size of dim 0."""
        if "uneven-rows" not in self.accepts and rows % self.shards:
            return False
        return "rows<ranks" in self.accepts or rows >= self.shards

    @property
    def rows(self) -> list[int]:
        """Sizes of dim 0 to draw from; two at least, so that every number of ranks needs the same draws."""
        largest = 3 if self.tiny else LARGEST_WIDTH
        return drawable([count for count in range(1, largest + 1) if self.fits(count)] or [self.shards])


def drawable(sizes: list[int]) -> list[int]:
    """``sizes``, a single one twice: Hypothesis needs no draw for it, and would take its case for a simpler one."""
    return sizes * 2 if len(sizes) == 1 else sizes


def model(draw: st.DrawFn, allowed: Allowed) -> ModelSpec:
    """A model that ``allowed.accepts`` covers."""
    kind = draw(among(_input_kinds(allowed)))
    balanced = [width for width in allowed.rows if width in (2, 4)]  # picked from without a draw of its own
    norm_possible = kind in ("vector", "sequence") and "layer-norm" in allowed.accepts and bool(balanced)
    layer_norm = norm_possible and draw(among((False, True)))
    tied = kind in ("vector", "sequence", "tokens") and allowed.has("tied")
    tied = tied and draw(among(_EVENLY if kind == "tokens" else _RARELY))
    features = draw(among(_features(allowed, kind, tied)))
    features = balanced[(features - 1) % len(balanced)] if layer_norm else features
    several = drawable([count for count in allowed.rows if count > 1] or [2 * allowed.shards])
    vocabulary = draw(among(several)) if kind in ("tokens", "bags") else 2
    spec = ModelSpec(
        (),
        input=kind,
        features=features,
        length=draw(st.integers(2 if kind in SPATIAL else 1, _longest(allowed, kind))) if kind != "vector" else 1,
        vocabulary=vocabulary,
        padding_idx=_padding(draw, allowed, vocabulary) if kind in ("tokens", "bags") else None,
        layer_norm=layer_norm,
    )
    spec = replace(spec, bags=draw(among(_bags(allowed, spec)))) if kind == "bags" else spec
    spec = _chain(draw, allowed, spec, tied)
    if tied:
        spec = _tie(spec, draw(among(_tied_pairs(len(spec.layers), kind))))
    spec = _thawed(spec)
    groupings = _groupings(spec, "root-parameters" in allowed.accepts)
    fewest = min(allowed.units, max(len(sizes) for sizes in groupings))
    return replace(spec, units=draw(among([sizes for sizes in groupings if len(sizes) >= fewest])))


def _input_kinds(allowed: Allowed) -> list[InputKind]:
    kinds: list[InputKind] = ["vector", "vector"]
    if "sequence" in allowed.accepts:
        rows: list[InputKind] = ["sequence", "tokens", "tokens", "sequence", "tokens"]
        kinds += rows if "tokens" in allowed.accepts else ["sequence"] * 2
    kinds += ["bags"] if allowed.has("bags") else []
    return kinds + (["signal", "image", "volume", "image"] if allowed.has("conv") else [])


def _features(allowed: Allowed, kind: InputKind, tied: bool) -> Sequence[int]:
    if kind in SPATIAL:
        return (1, 2) if allowed.tiny else (1, 2, 3, 4, 4, 4, 4, 4)  # four channels are two groups of two
    return allowed.rows if tied else range(1, 4 if allowed.tiny else LARGEST_WIDTH + 1)


def _longest(allowed: Allowed, kind: InputKind) -> int:
    """Most positions, or the largest extent of each spatial direction."""
    return 2 if allowed.tiny else {"signal": 5, "image": 4, "volume": 3}.get(kind, 4)


def _bags(allowed: Allowed, spec: ModelSpec) -> tuple[Bags, ...]:
    """Sums, and mostly means where a bag's numbers of tokens are powers of two; at least two, to be drawn from."""
    dyadic = spec.length in (1, 2) or (spec.length == 4 and spec.padding_idx is None)
    return ("sum", "mean", "mean", "mean") if dyadic and allowed.has_form("mean-bags") else ("sum", "sum")


def _padding(draw: st.DrawFn, allowed: Allowed, vocabulary: int) -> int | None:
    wanted = "padding_idx" in allowed.accepts and draw(among((False, True)))
    return draw(st.integers(0, vocabulary - 1)) if wanted else None


def _chain(draw: st.DrawFn, allowed: Allowed, spec: ModelSpec, tied: bool) -> ModelSpec:
    """``spec`` with one to three layers, two at least if two of them are tied, and one for each unit asked for.

    Every layer is five draws, the first asking for it, and the end is one: shrinking drops up to five draws in a row,
    so it drops layers.
    """
    least, most = 2 if tied and spec.input != "tokens" else 1, 2 if allowed.tiny else 3
    least, most = max(least, allowed.units - spec.has_front), max(most, allowed.units - spec.has_front)
    while True:
        one_more, count = draw(among((False, True, True))), len(spec.layers)
        if count == most or (count >= least and not one_more):
            return spec
        spec = replace(spec, layers=(*spec.layers, _layer(draw, allowed, spec, tied)))


def _layer(draw: st.DrawFn, allowed: Allowed, so_far: ModelSpec, tied: bool) -> LayerSpec:
    """The next layer, in four draws. A kind that has no width of its own draws one all the same."""
    width = draw(among(allowed.rows))
    bias, frozen = draw(among(_biases(allowed.accepts)))
    activation = draw(among(POLYNOMIAL + OFF_THE_GRID if allowed.off_the_grid else POLYNOMIAL))
    entering, spatial = _reached(so_far)
    plain = LayerSpec(width, bias, activation, frozen)
    kinds = [plain] if tied else _kinds(allowed, plain, entering, spatial, first=not so_far.layers)
    return draw(among(kinds))


@lru_cache(maxsize=64)
def _biases(accepts: frozenset[Trait]) -> tuple[tuple[bool, Freeze], ...]:
    """(bias, what is frozen): mostly nothing."""
    found: list[tuple[bool, Freeze]] = [(False, "none")] * 4
    found += [(True, "none")] * 4 if "bias" in accepts else []
    found += [(False, "weight")] if "frozen" in accepts else []
    found += [(True, "weight"), (True, "bias"), (True, "all")] if accepts >= {"bias", "frozen"} else []
    return tuple(found)


def _kinds(allowed: Allowed, plain: LayerSpec, entering: Shape, spatial: bool, first: bool) -> list[LayerSpec]:
    """``plain`` as each layer that may stand where ``entering`` arrives; kinds are equally likely, but norms rarer."""
    kinds: list[list[LayerSpec]] = [] if spatial and first else [[plain]] * 3
    if spatial:
        kinds += [_convolutions(allowed, plain, entering)] * 3
        kinds += [_group_norms(plain, entering)] * 6 if _takes_groups(allowed, entering) else []
    if not first or not spatial:
        kinds += _row_layers(allowed, plain, entering, spatial)
    most = max(len(layers) for layers in kinds)
    return [layer for layers in kinds for layer in layers * (most // len(layers))]


def _convolutions(allowed: Allowed, plain: LayerSpec, entering: Shape) -> list[LayerSpec]:
    """Every window; those with several channels in each of several groups are three of four, where there are any.

    Their width is the next that their groups divide.
    """
    found = [_windowed(plain, window) for window in windows(entering, plain.width, allowed.tiny)]
    grouped = []
    for groups in (count for count in range(2, entering[0]) if entering[0] % count == 0):
        wide = replace(plain, width=math.ceil(plain.width / groups) * groups)
        if allowed.fits(wide.width):
            layers = [_windowed(wide, window) for window in windows(entering, wide.width, allowed.tiny)]
            grouped += [layer for layer in layers if layer.groups == groups]
    rest = [layer for layer in found if layer.groups in (1, entering[0])]
    every = rest + grouped * math.ceil(3 * len(rest) / max(len(grouped), 1))
    same = _same(every) if allowed.has_form("same-padding") else []
    every += same * (len(every) // (2 * max(len(same), 1)))
    return every + (list(_not_of_zeros(every, entering)) if allowed.has_form("padding-mode") else [])


def _windowed(plain: LayerSpec, window: tuple[int, int, int, int, int]) -> LayerSpec:
    kernel, stride, padding, dilation, groups = window
    return replace(plain, kind="conv", kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)


def _same(layers: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Those of stride 1 without padding that padding by the size of the kernel changes, so padded."""
    fit = (layer for layer in layers if layer.stride == 1 and not layer.padding and layer.kernel > 1)
    return [replace(layer, same=True) for layer in fit]


def _not_of_zeros(layers: Sequence[LayerSpec], entering: Shape) -> Iterator[LayerSpec]:
    """Those with padding that numbers of the input can fill, in each mode in turn."""
    modes: tuple[PaddingMode, ...] = ("reflect", "replicate", "circular")
    around = ((layer.dilation * (layer.kernel - 1) if layer.same else layer.padding, layer) for layer in layers)
    fit = [layer for size, layer in around if 0 < size < min(entering[1:])]
    for place, layer in enumerate(fit):
        yield replace(layer, padding_mode=modes[place % len(modes)])


def _group_norms(plain: LayerSpec, entering: Shape) -> list[LayerSpec]:
    norm = replace(plain, kind="group_norm", width=entering[0], bias=True)
    return [replace(norm, groups=count) for count in _groups(entering) for _ in range(1 if count == 1 else 4)]


def _takes_groups(allowed: Allowed, entering: Shape) -> bool:
    """Whether a GroupNorm, which always has a bias, may stand here."""
    accepted = allowed.has("group-norm") and "bias" in allowed.accepts
    return allowed.off_the_grid and accepted and allowed.fits(entering[0]) and bool(_groups(entering))


def _row_layers(allowed: Allowed, plain: LayerSpec, entering: Shape, spatial: bool) -> list[list[LayerSpec]]:
    """What normalises or mixes rows as they are, or behind a Flatten."""
    reached = math.prod(entering) if spatial else entering[-1]
    if not allowed.off_the_grid or reached > _WIDEST_ROW or not allowed.fits(reached):
        return []
    row = replace(plain, width=reached)
    layers = _layer_norm(allowed, row)
    if allowed.has("rms-norm"):
        frozen: Freeze = "weight" if plain.frozen in ("weight", "all") else "none"
        layers.append([replace(row, kind="rms_norm", bias=False, frozen=frozen)])
    if len(entering) == 2 and not spatial and allowed.has("attention"):
        layers += _attentions(allowed, row, entering[0])
    return layers


def _attentions(allowed: Allowed, row: LayerSpec, positions: int) -> list[list[LayerSpec]]:
    """Of one head, and thrice as often of several where they are accepted and differ from it, masked or not."""
    one, most = replace(row, kind="attention"), row.width
    heads = [count for count in range(2, most + 1) if most % count == 0]
    if not heads or positions == 1 or not allowed.has_form("several-heads"):
        return [[one]] * 4
    masks: tuple[Mask, ...] = ("none", "causal")
    masks += ("keys", "both") if allowed.grid else ()
    masks = masks if allowed.has_form("masked") else ("none",)
    return [[one], *([replace(one, heads=n, mask=mask) for mask in masks] for n in (heads[0], heads[0], heads[-1]))]


def _layer_norm(allowed: Allowed, row: LayerSpec) -> list[list[LayerSpec]]:
    """A LayerNorm, with a bias if one without is not accepted."""
    if "layer-norm" not in allowed.accepts:
        return []
    if "layer-norm-without-bias" in allowed.accepts:
        return [[replace(row, kind="layer_norm")]]
    return [[replace(row, kind="layer_norm", bias=True)]] if "bias" in allowed.accepts else []


def _reached(so_far: ModelSpec) -> tuple[Shape, bool]:
    """(shape of one sample behind the layers so far, whether it is channels and spatial directions)."""
    shape = body_output(so_far) if so_far.layers else body_input(so_far)
    return shape, so_far.input in SPATIAL and all(layer.kind in ("conv", "group_norm") for layer in so_far.layers)


def _groups(entering: Shape) -> list[int]:
    """Numbers of groups for a GroupNorm, several values in each."""
    return [count for count in range(1, entering[0] + 1) if entering[0] % count == 0 and math.prod(entering) > count]


@lru_cache(maxsize=256)
def windows(entering: Shape, width: int, tiny: bool) -> tuple[tuple[int, int, int, int, int], ...]:
    """(kernel, stride, padding, dilation, groups) that leave something of every direction, plainest first."""
    found = [
        (kernel, stride, padding, dilation, groups)
        for kernel in ((1, 2) if tiny else (1, 2, 3))
        for stride in (1, 2)
        for padding in (0, 1)
        for dilation in ((1, 2) if kernel > 1 else (1,))
        for groups in range(1, entering[0] + 1)
        if entering[0] % groups == 0 and width % groups == 0
        if min(entering[1:]) + 2 * padding >= dilation * (kernel - 1) + 1
    ]
    return tuple(sorted(found, key=sum))


def _tied_pairs(depth: int, kind: InputKind) -> list[tuple[int, int]]:
    """Two layers that may share a weight, or the Embedding (-1) and a layer, which stands thrice."""
    first = -1 if kind == "tokens" else 0
    found = [(a, b) for b in range(depth) for a in range(first, b)]
    return found + [pair for pair in found if pair[0] < 0] * 2


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
