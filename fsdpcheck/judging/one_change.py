"""One change at a time: which single change of the case shown makes the law hold? Never part of a verdict by itself.

The changes are those that make a case more ordinary: one rank, one micro-batch, nothing tied. Only cases of a kind that
the law draws are asked of it: a change counts where some case that was drawn is already so. What a change leaves
inexact is not told. So "holds with one micro-batch" says that this case, with nothing else changed, holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any, Final

from fsdpcheck.case import Case, LayerSpec, TrainingCase
from fsdpcheck.case.training import BatchLayout
from fsdpcheck.errors import InvalidCase
from fsdpcheck.findings.roots import OTHER_NUMBERS

_TOLD: Final = 4
"""Most changes that are named: where more make a law hold, the case is at an edge of its own."""


@dataclass(frozen=True)
class Change:
    """``is_so(case)``: whether the case is so without it. ``make(case)``: the case with it; raises for what is none."""

    words: str
    is_so: Callable[[Any], bool]
    make: Callable[[Any], Case]


@dataclass(frozen=True)
class Tried:
    """Changes of one case by what came of each alone, in words. ``holding``: the changed cases that hold."""

    holds: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    holding: tuple[Case, ...] = ()


def tried(case: Case, drawn: Collection[Case], holds: Callable[[Case], bool | None]) -> Tried:
    """Changes of ``case``, one at a time. ``drawn``: cases that the law draws. ``holds(case)``: None for unknown."""
    found = [(words, changed, holds(changed)) for words, changed in _changed(case, drawn)]
    return Tried(
        tuple(words for words, _, held in found if held),
        tuple(words for words, _, held in found if held is False),
        tuple(changed for words, changed, held in found if held and words != OTHER_NUMBERS),
    )


def lacks(case: Case, changes: Collection[str]) -> bool:
    """Whether ``case`` is so with none of ``changes``, as the case is that they were tried on."""
    known = CHANGES if isinstance(case, TrainingCase) else tuple(_plainer(case))
    return not any(change.words in changes and change.is_so(case) for change in known)


def in_words(tried: Tried) -> str:
    """Which changes make the law hold; "" where none could be tried."""
    told, failing = [*tried.holds], len(tried.breaks)
    others = f"{failing} other{'s' * (failing != 1)}"
    if not told:
        return f"breaks with each of {failing} single changes as well" if failing > 1 else ""
    if told == [OTHER_NUMBERS]:
        return f"holds with other numbers alone, none of {others}: values matter, no single part of the case"
    more = len(told) - _TOLD
    listed = "; or ".join(told[:_TOLD]) + (
        f"; or {more} others" if more > 1 else f"; or {told[-1]}" if more == 1 else ""
    )
    return f"holds with one change: {listed}" + (f"; breaks with {others} as well" if failing else "")


def _changed(case: Case, drawn: Collection[Case]) -> Iterator[tuple[str, Case]]:
    """(words, the case with one change), of cases that can be and that some drawn case is like."""
    known = {case}
    for change in CHANGES if isinstance(case, TrainingCase) else _plainer(case):
        if change.is_so(case) or not any(type(one) is type(case) and change.is_so(one) for one in drawn):
            continue
        try:
            made = change.make(case)
        except InvalidCase:
            continue
        if made not in known:
            known.add(made)
            yield change.words, made
    yield OTHER_NUMBERS, replace(case, seed=case.seed + 1)


def _plainer(case: Any) -> Iterator[Change]:
    """Of a case that trains nothing: each field at its default."""
    for path, default in _defaults(case, ()):
        if path != ("seed",):
            yield Change(f"{'.'.join(path)} = {default}", partial(_is_at, path, default), partial(_put, path, default))


def _defaults(part: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for each in fields(part):
        value = getattr(part, each.name)
        if is_dataclass(value):
            yield from _defaults(value, (*path, each.name))
        elif each.default is not MISSING:
            yield (*path, each.name), each.default


def _is_at(path: tuple[str, ...], value: Any, part: Any) -> bool:
    for name in path:
        part = getattr(part, name)
    return bool(part == value)


def _put(path: tuple[str, ...], value: Any, part: Any) -> Any:
    name, *rest = path
    return replace(part, **{name: _put(tuple(rest), value, getattr(part, name)) if rest else value})


def _fitting(case: TrainingCase, **changed: Any) -> TrainingCase:
    """The case with these parts, with samples and a normaliser that its ranks can have. Raises InvalidCase for none."""
    mesh, step, layout = (changed.pop(name, getattr(case, name)) for name in ("mesh", "step", "layout"))
    if mesh != case.mesh and (layout.counts or layout.lists):
        layout = BatchLayout("contiguous", max(1, layout.batch_size))
    error: InvalidCase | None = None
    for normaliser in (step.normaliser, *(mesh.world_size * factor for factor in (1, 2, 4)), 1, 2, 4):
        try:
            return replace(case, mesh=mesh, layout=layout, step=replace(step, normaliser=normaliser), **changed)
        except InvalidCase as found:
            error = error or found
    assert error is not None
    raise error


def _step(words: str, **values: Any) -> Change:
    """The first of ``values`` is what the change is about, others go with it."""
    return _of_part(words, "step", values)


def _of_part(words: str, part: str, values: dict[str, Any]) -> Change:
    name, value = next(iter(values.items()))
    return Change(
        words,
        lambda case: getattr(getattr(case, part), name) == value,
        lambda case: _fitting(case, **{part: replace(getattr(case, part), **values)}),
    )


def _optimizer(words: str, **values: Any) -> Change:
    name, value = next(iter(values.items()))

    def make(case: TrainingCase) -> TrainingCase:
        return _fitting(case, step=replace(case.step, optimizer=replace(case.step.optimizer, **values)))

    return Change(words, lambda case: getattr(case.step.optimizer, name) == value, make)


def _layers(words: str, **values: Any) -> Change:
    """Every layer has ``values``."""
    name, value = next(iter(values.items()))

    def make(case: TrainingCase) -> TrainingCase:
        return _with_layers(case, tuple(replace(layer, **values) for layer in case.model.layers))

    return Change(words, lambda case: all(getattr(layer, name) == value for layer in case.model.layers), make)


def _with_layers(case: TrainingCase, layers: tuple[LayerSpec, ...], **values: Any) -> TrainingCase:
    return _fitting(case, model=replace(case.model, layers=layers, **values))


def _of_kind(kind: str, words: str) -> Change:
    """No layer of that kind: linear ones of the same width."""

    def make(case: TrainingCase) -> TrainingCase:
        return _with_layers(case, tuple(LayerSpec(x.width, x.bias) if x.kind == kind else x for x in case.model.layers))

    return Change(words, lambda case: all(layer.kind != kind for layer in case.model.layers), make)


def _of_normaliser_1(case: TrainingCase) -> TrainingCase:
    return replace(case, step=replace(case.step, normaliser=1))


def _one_unit(case: TrainingCase) -> TrainingCase:
    return _fitting(case, model=replace(case.model, units=(), bare_units=False))


def _even(case: TrainingCase) -> TrainingCase:
    """As many samples on each rank, one for each micro-batch at least."""
    most = max(case.step.micro_batches, *case.local_sizes)
    return _fitting(case, layout=BatchLayout("contiguous", most * case.mesh.data_ranks))


def _alone(case: TrainingCase) -> TrainingCase:
    step = replace(case.step, unequal=False)
    return _fitting(case, mesh=replace(case.mesh, dp_shard=1, dp_replicate=1, axes=()), step=step)


CHANGES: Final = (
    _of_part("parameters resharded after forward", "mesh", {"reshard_after_forward": True}),
    _step("as many micro-batches on each rank", unequal=False),
    _step("one micro-batch", micro_batches=1, sync_every=True, unequal=False),
    _step("a reduction after every micro-batch", sync_every=True, unequal=False),
    _step("one step", steps=1, resume=False, thaws=False, refreezes=False),
    _step("immediate norms", norms="immediate"),
    _step("nothing clipped", clipping="unclipped"),
    _step("complete contributions", contribution="complete"),
    _step("one clip norm for the whole model", clip_groups="all"),
    _step("no global clipping", max_grad_norm=None),
    _step("no noise", noise_multiplier=0.0),
    _step("noise of the ordinary generator", secure_noise=False),
    _step("a loss summed over samples", reduction="sum"),
    _step("squared errors", loss="mse"),
    _step("no resumption", resume=False),
    _step("no evaluation between steps", evaluates="no"),
    _step("no other model trained before", rebuilds=False),
    Change("N = 1", lambda case: case.step.normaliser == 1, _of_normaliser_1),
    _optimizer("SGD", kind="sgd", groups="one"),
    _optimizer("no weight decay", weight_decay=0.0),
    _optimizer("no momentum", momentum=0.0),
    _optimizer("a constant learning rate", schedule="constant"),
    _optimizer("one group of parameters", groups="one"),
    _layers("no bias", bias=False),
    _layers("nothing frozen", frozen="none"),
    _layers("no activation", activation="identity"),
    _layers("each layer run once", used="once"),
    _layers("one group of channels", groups=1),
    _layers("no dilation", dilation=1),
    _layers("a stride of one", stride=1),
    _layers("no padding of convolutions", padding=0, padding_mode="zeros"),
    _layers("no padding by the size of the kernel", same=False, padding_mode="zeros"),
    _layers("padding of convolutions with zeros", padding_mode="zeros"),
    _layers("attention without masks", mask="none"),
    _layers("attention of one head", heads=0, mask="none"),
    _of_part("bags added up", "model", {"bags": "sum"}),
    _of_kind("conv", "linear layers for convolutions"),
    _of_kind("attention", "linear layers for attention"),
    _of_kind("group_norm", "linear layers for group norms"),
    _of_kind("layer_norm", "linear layers for layer norms"),
    _of_kind("rms_norm", "linear layers for RMS norms"),
    _of_part("units that hold their layers", "model", {"bare_units": False}),
    _of_part("nothing tied", "model", {"tied": None}),
    _of_part("no LayerNorm in front", "model", {"layer_norm": False}),
    _of_part("no padding_idx", "model", {"padding_idx": None}),
    _of_part("one position", "model", {"length": 1}),
    _of_part("vectors as inputs", "model", {"input": "vector", "padding_idx": None, "length": 1}),
    Change("one unit for the whole model", lambda case: not case.model.units, _one_unit),
    _of_part("blocks of samples a rank", "layout", {"kind": "contiguous", "counts": (), "lists": ()}),
    Change("as many samples on each rank", lambda case: len({*case.local_sizes}) == 1, _even),
    Change(
        "a sample for each micro-batch", lambda case: min(case.local_sizes) >= case.step.micro_batches, _even
    ),
    _of_part("float64", "arithmetic", {"dtype": "float64", "compute": "dtype"}),
    _of_part("computation in the parameters' dtype", "arithmetic", {"compute": "dtype"}),
    _of_part("averages divided after the sum", "arithmetic", {"averaging": "divide"}),
    Change("one rank", lambda case: case.world_size == 1, _alone),
    _of_part("one shard", "mesh", {"dp_shard": 1}),
    _of_part("no replicas", "mesh", {"dp_replicate": 1}),
    _of_part("no axis that shares out the model", "mesh", {"axes": ()}),
)  # fmt: skip
"""Of cases that train: what makes one more ordinary; what nearly any mistake of ranks needs comes last."""
