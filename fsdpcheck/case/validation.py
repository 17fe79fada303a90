"""Validation: which combinations of a training case's values are consistent. Used by ``TrainingCase``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING

from fsdpcheck.case import fields
from fsdpcheck.case.axes import AXES
from fsdpcheck.case.refusal import refuse
from fsdpcheck.case.shapes import SPATIAL, Stage, item_units, stages
from fsdpcheck.case.traits import OWN_TRAITS

if TYPE_CHECKING:
    from fsdpcheck.case.model import LayerSpec, ModelSpec, UserModelSpec
    from fsdpcheck.case.training import MeshSpec, TrainingCase

_MAX_ELEMENTS = 1 << 22
"""Largest model and largest data set a case may describe, so that a hostile token cannot ask for all memory."""


def validate(case: TrainingCase) -> None:
    """Raises InvalidCase, naming the field, when the case contradicts itself or leaves the supported ranges."""
    fields.require_words(_parts(case))
    fields.require_ranges(_ranges(case))
    _validate_axes(case.mesh)
    _validate_model(case.model)
    _validate_layout(case)
    _validate_step(case)
    _validate_optimizer(case)
    _validate_numbers(case)
    _validate_size(case)


def is_power_of_two(value: float | Fraction) -> bool:
    """Whether ``value`` is 2**k, k of any sign."""
    above, below = value.as_integer_ratio()
    return above > 0 and above & (above - 1) == 0 and below & (below - 1) == 0


def whole_or_float(value: Fraction) -> int | float:
    """A dyadic number as a case holds it: an int where it is a whole number."""
    return int(value) if value.denominator == 1 else float(value)


def _parts(case: TrainingCase) -> Iterator[tuple[str, object]]:
    """What has fields, by name."""
    yield from ((field.name, getattr(case, field.name)) for field in dataclasses.fields(case))
    yield from ((f"model.layers[{index}]", layer) for index, layer in enumerate(case.model.layers))
    yield "step.optimizer", case.step.optimizer


def _ranges(case: TrainingCase) -> Iterator[fields.Range]:
    """(field, value, lowest, highest) of every number."""
    model, step, layout = case.model, case.step, case.layout
    yield from fields.of_mesh(case.mesh)
    yield "the number of model.layers", len(model.layers), 1 if model.own is None else 0, 64
    for index, layer in enumerate(model.layers):
        yield f"model.layers[{index}].width", layer.width, 1, 4096
        yield f"model.layers[{index}].kernel", layer.kernel, 1, 64
        yield f"model.layers[{index}].stride", layer.stride, 1, 64
        yield f"model.layers[{index}].padding", layer.padding, 0, 64
        yield f"model.layers[{index}].dilation", layer.dilation, 1, 64
        yield f"model.layers[{index}].groups", layer.groups, 1, 4096
    yield "model.features", model.features, 1, 4096
    yield "model.length", model.length, 1, 4096
    yield "model.vocabulary", model.vocabulary, 1, 1 << 16
    for index, size in enumerate(model.units):
        yield f"model.units[{index}]", size, 1, 65
    yield "layout.batch_size", layout.batch_size, 1, 4096
    for rank, count in enumerate(layout.counts):
        yield f"layout.counts[{rank}]", count, 0, 4096
    for rank, own in enumerate(layout.lists):
        yield f"the length of layout.lists[{rank}]", len(own), 0, 4096
        for place, sample in enumerate(own):
            yield f"layout.lists[{rank}][{place}]", sample, 0, layout.batch_size - 1
    yield "step.noise_multiplier", step.noise_multiplier, 0.0, 2.0**16
    yield "step.steps", step.steps, 1, 256
    yield "step.micro_batches", step.micro_batches, 1, 256
    yield "step.normaliser", step.normaliser, 2.0**-20, 1 << 40
    yield "step.clip_norm", step.clip_norm, 1, 1 << 52
    if step.max_grad_norm is not None:
        yield "step.max_grad_norm", step.max_grad_norm, 2.0**-64, 2.0**64
    yield "step.optimizer.lr_exponent", step.optimizer.lr_exponent, 0, 64
    yield "step.optimizer.momentum", step.optimizer.momentum, 0.0, 1.0
    yield "step.optimizer.weight_decay", step.optimizer.weight_decay, 0.0, 1.0
    yield "arithmetic.weights", case.arithmetic.weights, 1, 1 << 20
    yield "arithmetic.inputs", case.arithmetic.inputs, 1, 1 << 20
    yield "arithmetic.world_factors", case.arithmetic.world_factors, 0, 4
    yield fields.of_seed(case.seed)


def _validate_model(spec: ModelSpec) -> None:
    if spec.own is not None:
        _validate_user_model(spec, spec.own)
        return
    items = len(spec.layers) + spec.has_front
    if sum(spec.units) > items:
        refuse("model.units", spec.units, f"sizes that add up to at most {items} layers", "make units smaller")
    if spec.bare_units:
        _validate_bare_units(spec)
    if spec.padding_idx is not None and spec.input not in ("tokens", "bags"):
        refuse("model.padding_idx", spec.padding_idx, "None without an Embedding", 'set input to "tokens"')
    if spec.padding_idx is not None and not 0 <= spec.padding_idx < spec.vocabulary:
        refuse("model.padding_idx", spec.padding_idx, f"a row of the {spec.vocabulary}", "choose a smaller row")
    if spec.bags != "sum" and spec.input != "bags":
        refuse("model.bags", spec.bags, f'"sum" with {spec.input}', 'set input to "bags"')
    if spec.layer_norm and spec.input not in ("vector", "sequence"):
        then = "a LayerNorm stands on raw vectors or sequences"
        refuse("model.layer_norm", True, f"False with {spec.input}", then)
    if spec.layer_norm and (spec.features < 2 or not is_power_of_two(spec.features)):
        refuse("model.features", spec.features, "an even power of two under a LayerNorm", "use 2, 4 or 8")
    for index, stage in enumerate(stages(spec)[spec.has_front :]):
        assert stage.spec is not None
        _validate_layer(f"model.layers[{index}]", stage, stage.spec)
    if spec.tied is not None:
        _validate_tied(spec, *spec.tied)


def _validate_user_model(spec: ModelSpec, own: UserModelSpec) -> None:
    """A user's model: nothing of the chain, and no trait that belongs to another part of the case."""
    if spec != type(spec)(layers=(), own=own):
        refuse("model", "layers or other fields of a chain", "none beside a model of your own", "leave them out")
    for name, reference in (("build", own.build), ("batch", own.batch), ("optimizer", own.optimizer or ":")):
        if ":" not in reference:
            refuse(f"model.own.{name}", reference, "pkg.mod:attr or file.py:attr", "name an object")
    for name, value in (("features", own.features), ("targets", own.targets), *(("rows", rows) for rows in own.rows)):
        if not 0 <= value <= _MAX_ELEMENTS:
            refuse(f"model.own.{name}", value, f"a number from 0 to {_MAX_ELEMENTS}", "choose one in the range")
    if unknown := sorted(set(own.traits) - OWN_TRAITS):
        refuse("model.own.traits", unknown[0], f"traits among {', '.join(sorted(OWN_TRAITS))}", "leave it out")


def _validate_bare_units(spec: ModelSpec) -> None:
    """Whoever calls the layer calls the unit: once in a forward, and nobody but it has its weight."""
    alone = [place for place, unit in enumerate(item_units(spec)) if unit >= 0 and spec.units[unit] == 1]
    used = {spec.layers[place - spec.has_front].used for place in alone if place >= spec.has_front}
    if not alone or used - {"once"} or spec.tied is not None:
        got = f"units {spec.units}, layers used {', '.join(sorted(used)) or 'never'}, tied {spec.tied}"
        wanted = "a unit of one layer, each such layer used once, nothing tied"
        refuse("model.bare_units", f"True with {got}", wanted, "leave it out, or set them")


_COPIED = ("replicated", "by-replica")
"""Layouts in which several ranks have the same samples."""


def _validate_layer(where: str, stage: Stage, layer: LayerSpec) -> None:
    used = {"conv": _WINDOW.keys(), "group_norm": {"groups"}}.get(layer.kind, ())
    for name, default in _WINDOW.items():
        if name not in used and getattr(layer, name) != default:
            refuse(f"{where}.{name}", getattr(layer, name), f"{default} for {layer.kind}", "leave it out")
    if layer.kind in ("conv", "group_norm"):
        _validate_channels(where, stage, layer)
    elif layer.kind != "linear" and layer.width != stage.entering[-1]:
        refuse(f"{where}.width", layer.width, f"{stage.entering[-1]}, the width that reaches it", "set it")
    if layer.kind == "attention" and len(stage.entering) != 2:
        refuse(f"{where}.kind", layer.kind, "positions to attend to", 'set input to "sequence" or "tokens"')
    _validate_form(where, layer)
    if layer.kind == "rms_norm" and layer.bias:
        refuse(f"{where}.bias", True, "False: a RMSNorm has none", "leave it out")
    if layer.used != "once" and (stage.channels_first or stage.entering != stage.leaving):
        wanted = f'"once" for a layer from {stage.entering} to {stage.leaving}'
        refuse(f"{where}.used", layer.used, wanted, "let it give what arrives, rows as long as it takes")
    if layer.used == "beside" and layer.kind != "linear":
        refuse(f"{where}.used", layer.used, f"another word for {layer.kind}", "use the weight of a Linear")


def _validate_form(where: str, layer: LayerSpec) -> None:
    """Several heads and their masks, and padding that follows from the kernel."""
    if layer.heads and layer.kind != "attention":
        refuse(f"{where}.heads", layer.heads, f"0 for {layer.kind}", "leave it out")
    if layer.heads < 0 or (layer.heads and layer.width % layer.heads):
        refuse(f"{where}.heads", layer.heads, f"0, or a number that divides {layer.width}", "choose one of them")
    if layer.mask != "none" and not layer.heads:
        refuse(f"{where}.mask", layer.mask, '"none" without heads', "give it heads")
    if layer.same and (layer.kind != "conv" or layer.stride != 1 or layer.padding):
        wanted = "False but for a convolution with stride 1 and padding 0"
        refuse(f"{where}.same", True, wanted, "leave it out, or set them")


_WINDOW = {"kernel": 1, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "padding_mode": "zeros"}
"""Fields of a convolution, with what they are where there is none."""


def _validate_channels(where: str, stage: Stage, layer: LayerSpec) -> None:
    """A convolution or a GroupNorm."""
    if not stage.channels_first:
        wanted = f"an input among {', '.join(SPATIAL)} and no layer on rows before it"
        refuse(f"{where}.kind", layer.kind, wanted, "move it to the front")
    channels = stage.entering[0]
    if layer.kind == "group_norm" and (layer.width != channels or not layer.bias):
        wanted = f"width {channels}, the channels that reach it, and a bias"
        refuse(f"{where}.width, bias", (layer.width, layer.bias), wanted, "set them")
    around = layer.dilation * (layer.kernel - 1) if layer.same else layer.padding
    if layer.padding_mode != "zeros" and not 0 < around < min(stage.entering[1:]):
        wanted = f'"zeros", or padding of less than {min(stage.entering[1:])}'
        refuse(f"{where}.padding_mode", f"{layer.padding_mode} with {around}", wanted, "set one of them")
    if channels % layer.groups or layer.width % layer.groups:
        wanted = f"a number that divides {channels} and {layer.width} channels"
        refuse(f"{where}.groups", layer.groups, wanted, "use fewer groups")
    if layer.kind == "group_norm" and math.prod(stage.entering) == layer.groups:
        refuse(f"{where}.groups", layer.groups, "groups of several values: one alone has no variance", "use fewer")
    if min(stage.leaving) < 1:
        got = f"an output of shape {stage.leaving} from {stage.entering}"
        refuse(f"{where}.kernel", got, "at least 1 in every direction", "use a smaller kernel or more padding")


def _validate_tied(spec: ModelSpec, first: int, second: int) -> None:
    lowest = -1 if spec.input == "tokens" else 0
    if not lowest <= first < second < len(spec.layers):
        refuse("model.tied", (first, second), f"{lowest} <= first < second < {len(spec.layers)}", "name two layers")
    one, two = stages(spec)[first + spec.has_front], stages(spec)[second + spec.has_front]
    if one.kind not in ("linear", "embedding") or two.kind != "linear":
        refuse("model.tied", f"layers of kinds {one.kind} and {two.kind}", "linear layers or an Embedding", "name two")
    if one.weights != two.weights:
        got = f"weights of shapes {one.weights[0]} and {two.weights[0]}"
        refuse("model.tied", got, "equal shapes", "make the two layers alike")
    frozen = [stage.spec is not None and stage.spec.frozen in ("weight", "all") for stage in (one, two)]
    if frozen[0] != frozen[1]:
        refuse("model.tied", "one layer with a frozen weight", "both or neither frozen", "freeze the shared weight")
    if any(stage.spec is not None and stage.spec.used != "once" for stage in (one, two)):
        refuse("model.tied", "a layer that runs otherwise", "layers that run once", 'set used to "once"')


def _validate_axes(mesh: MeshSpec) -> None:
    names = [axis for axis, _ in mesh.axes]
    wanted = [axis for axis in AXES if axis in names]
    if names != wanted:
        refuse("mesh.axes", names, f"each axis once, in the order {', '.join(AXES)}", "sort them")


def _validate_layout(case: TrainingCase) -> None:
    layout, world = case.layout, case.mesh.data_ranks
    if layout.kind == "ragged" and (len(layout.counts) != world or sum(layout.counts) != layout.batch_size):
        wanted = f"{world} counts that add up to {layout.batch_size}"
        refuse("layout.counts", layout.counts, wanted, "one count a rank that samples are dealt out to")
    if layout.kind != "ragged" and layout.counts:
        refuse("layout.counts", layout.counts, f"none for a {layout.kind} layout", 'only "ragged" has counts')
    one_each = {"listed": (world,), "replicated": (0, 1), "by-replica": (case.mesh.dp_replicate,)}
    wanted_lists = one_each.get(layout.kind, (0,))
    if len(layout.lists) not in wanted_lists:
        wanted = f"{' or '.join(map(str, wanted_lists))} lists for a {layout.kind} layout"
        said = 'one a rank if "listed", one a replica if "by-replica", one in all if "replicated"'
        refuse("layout.lists", layout.lists, wanted, said)
    if layout.kind != "sampler" and (layout.shuffle or layout.drop_last):
        refuse("layout.shuffle, drop_last", (layout.shuffle, layout.drop_last), "False", 'only "sampler" has them')


def _validate_step(case: TrainingCase) -> None:
    step, world = case.step, case.mesh.data_ranks
    if isinstance(step.normaliser, float) and step.normaliser.is_integer():
        refuse("step.normaliser", step.normaliser, f"the int {int(step.normaliser)}", "whole numbers are ints")
    if not (is_power_of_two(step.normaliser) or is_power_of_two(Fraction(step.normaliser) / world)):
        wanted = f"a power of two, or one times the {world} shares of the batch"
        refuse("step.normaliser", step.normaliser, wanted, "choose such an N")
    if step.reduction == "mean":
        _validate_mean(case)
    if step.noise_multiplier and not step.private:
        refuse("step.noise_multiplier", step.noise_multiplier, "0.0 without per-sample clipping", "clip, or add none")
    if step.secure_noise and not step.private:
        refuse("step.secure_noise", True, "False without per-sample clipping", "clip, or add none")
    if step.private and step.max_grad_norm is not None:
        refuse("step.max_grad_norm", step.max_grad_norm, "None with per-sample clipping", "clip one way")
    if step.across != "nothing" and (not step.private or case.model.own is not None):
        wanted = '"nothing" but for a drawn model under per-sample clipping'
        refuse("step.across", step.across, wanted, "set it, or clip")
    if step.thaws and (step.private or step.steps == 1 or case.model.own is not None):
        refuse(
            "step.thaws", True, "several steps of plain training of a drawn model", "take two steps, or thaw nothing"
        )
    if step.refreezes and (not step.thaws or step.steps < 3):
        refuse("step.refreezes", True, "three steps or more, and thaws", "thaw, or freeze nothing")
    if step.optimizer.groups == "last unit apart" and (not case.model.units or case.model.tied is not None):
        wanted = "a drawn model of inner units that ties no weight"
        refuse("step.optimizer.groups", step.optimizer.groups, wanted, "make one group")
    if step.unequal and (step.micro_batches == 1 or step.sync_every or world == 1 or case.layout.kind in _COPIED):
        wanted = "several micro-batches, reduced after the last, of several ranks with samples of their own"
        refuse("step.unequal", True, wanted, "or give all ranks as many")
    if step.clip_groups == "units" and case.model.bare_units:
        refuse("step.clip_groups", step.clip_groups, '"all" where units are bare: they hold no gauge', "set it")
    if step.clip_groups != "all" and not (step.private and case.model.units and case.arithmetic.numbers == "grid"):
        wanted = '"all" without clipping, without inner units, and with real numbers'
        refuse("step.clip_groups", step.clip_groups, wanted, "set it")
    if not step.private and (step.norms, step.contribution) != ("immediate", "complete"):
        got = (step.norms, step.contribution)
        refuse("step.norms, contribution", got, "the defaults without clipping", "there are no per-sample norms")


def _validate_mean(case: TrainingCase) -> None:
    """Local means averaged over ranks are the single device's mean only for equal local sizes, in one micro-batch."""
    sizes, step = set(case.local_sizes), case.step
    size = min(sizes)
    if len(sizes) > 1 or not is_power_of_two(size) or step.micro_batches > 1 or case.layout.kind in _COPIED:
        got = f"local sizes {case.local_sizes} of a {case.layout.kind} batch in {step.micro_batches} micro-batches"
        refuse("step.reduction", f'"mean" with {got}', "equal powers of two in one micro-batch", 'or use "sum"')
    samples = case.shares * size
    if step.normaliser != samples:
        refuse("step.normaliser", step.normaliser, f"{samples}, the samples of all ranks, with a mean", "set it")


def _validate_optimizer(case: TrainingCase) -> None:
    optimizer = case.step.optimizer
    if optimizer.kind == "own":
        _validate_own_optimizer(case)
    for name, value in (("momentum", optimizer.momentum), ("weight_decay", optimizer.weight_decay)):
        if not (value * 2.0**16).is_integer():
            refuse(f"step.optimizer.{name}", value, "a multiple of 2**-16", "use 0.5 or 0.25")
    if optimizer.kind in ("newton_schulz", "row_scaled"):
        _validate_matrix_optimizer(case)
    if optimizer.kind != "sgd" and optimizer.momentum:
        refuse("step.optimizer.momentum", optimizer.momentum, f"0.0 with {optimizer.kind}", "its betas are fixed")


def _validate_matrix_optimizer(case: TrainingCase) -> None:
    """Its sums are exact for few bits alone."""
    if case.step.private or case.step.max_grad_norm is not None or case.step.optimizer.weight_decay:
        got = f"clipping {case.step.clipping!r}, max_grad_norm {case.step.max_grad_norm}"
        got += f", weight_decay {case.step.optimizer.weight_decay}"
        refuse(
            "step.optimizer.kind",
            f'"{case.step.optimizer.kind}" with {got}',
            "plain training without decay",
            "draw another",
        )
    if case.arithmetic.dtype != "float64" or case.arithmetic.numbers != "grid":
        got = f'"{case.step.optimizer.kind}" with {case.arithmetic.numbers} numbers in {case.arithmetic.dtype}'
        refuse("step.optimizer.kind", got, "a grid in float64", "draw another")


def _validate_own_optimizer(case: TrainingCase) -> None:
    """A user's optimizer has its own rate and state, and updates nothing of the harness's beside the user's model."""
    own, optimizer = case.model.own, case.step.optimizer
    if own is None or not own.optimizer:
        refuse("step.optimizer.kind", "own", '"own" where model.own.optimizer names a function', "draw one")
    if case.step.private or own.gauge or case.step.resume:
        got = f"clipping {case.step.clipping!r}, gauge {own.gauge}, resume {case.step.resume}"
        refuse("step.optimizer.kind", f'"own" with {got}', "plain training without gauge and resume", "draw one")
    if optimizer != type(optimizer)("own"):
        refuse("step.optimizer", "a rate, momentum, decay or schedule", "none beside an optimizer of your own", "leave")


def _validate_numbers(case: TrainingCase) -> None:
    """Real numbers are on no grid: there is nothing to project to, and no integer to be a sum of four squares."""
    if case.arithmetic.numbers == "real" and case.arithmetic.project:
        refuse("arithmetic.project", True, "False with real numbers", "set it")
    if case.arithmetic.numbers == "real" and case.step.clipping == "exact":
        refuse("step.clipping", "exact", "another family with real numbers", 'use "unclipped" or "probe"')
    if case.arithmetic.numbers == "real" and any(layer.mask in ("keys", "both") for layer in case.model.layers):
        wanted = '"none" or "causal" with real numbers, which rounding brings below zero'
        refuse("model.layers.mask", "keys of each sample", wanted, "set one of them")
    if any(layer.used not in ("once", "dropped") for layer in case.model.layers):
        _validate_uses(case)
    if case.arithmetic.compute != "dtype":
        _validate_compute(case)
    own = case.model.own
    names = own.names if own is not None and not (own.widened and case.arithmetic.numbers == "grid") else ""
    if names and case.arithmetic.dtype != "float32":
        wanted = f"float32 for a model that names {names}: beside float64 it would raise or round"
        refuse("arithmetic.dtype", case.arithmetic.dtype, wanted, "set it")
    if case.arithmetic.world_factors == 0:
        _validate_any_sum(case)


def _validate_any_sum(case: TrainingCase) -> None:
    """A sum that W need not divide is rounded where it is divided: right only if that is done once, and at the end."""
    step, arithmetic = case.step, case.arithmetic
    if step.reductions > 1 or step.private or case.mesh.dp_replicate > 1 or arithmetic.averaging != "divide":
        wanted = "1 or more where averages are taken twice, before a sum, or of clipped gradients"
        refuse("arithmetic.world_factors", 0, wanted, "losses carry the factor W for these")


def _validate_uses(case: TrainingCase) -> None:
    """A sample goes the same way wherever it is computed only if what arrives has the same bits."""
    arithmetic = case.arithmetic
    if arithmetic.numbers != "grid" or arithmetic.compute != "dtype":
        got = f"a layer that is routed or runs twice, on {arithmetic.numbers} numbers in {arithmetic.compute}"
        refuse("model.layers, used", got, '"once", or a grid and the case\'s own dtype', "set it")


def _validate_compute(case: TrainingCase) -> None:
    """Low precision lies under float32; a fraction has more bits than it holds. Its proof knows one factor a sample."""
    arithmetic = case.arithmetic
    if arithmetic.dtype != "float32" or arithmetic.numbers != "grid":
        got = f"{arithmetic.compute!r} under {arithmetic.dtype} on {arithmetic.numbers} numbers"
        refuse("arithmetic.compute", got, '"dtype", or float32 on a grid', "set dtype and numbers")
    if case.step.clip_groups != "all":
        refuse("step.clip_groups", case.step.clip_groups, f'"all", computing in {arithmetic.compute}', "set it")


def _validate_size(case: TrainingCase) -> None:
    if case.model.own is not None:  # runs only where its user has named it
        return
    chain = stages(case.model)
    parameters = sum(math.prod(shape) for stage in chain for shape in stage.shapes.values())
    widest = max(max(math.prod(stage.entering), math.prod(stage.leaving)) for stage in chain)
    widest = max([widest, *(stage.entering[0] ** 2 for stage in chain if stage.kind == "attention")])
    samples = case.layout.batch_size * case.step.steps
    for where, size in (("the model", parameters), ("the data set", samples * widest)):
        if size > _MAX_ELEMENTS:
            refuse(f"the size of {where}", size, f"at most {_MAX_ELEMENTS} elements", "make the case smaller")
