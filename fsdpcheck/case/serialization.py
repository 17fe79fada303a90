"""A Case as text: strict, versioned JSON, and words for people. Used by ``Case`` alone."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import TYPE_CHECKING, Any, NoReturn

from fsdpcheck.case import kernel as case_kernel
from fsdpcheck.case import sampler as case_sampling
from fsdpcheck.case.refusal import refuse
from fsdpcheck.case.shapes import SPATIAL, Stage, body_input, stages
from fsdpcheck.errors import InvalidCase

if TYPE_CHECKING:
    from fsdpcheck.case import Case, ModelSpec, UserModelSpec

_LONGEST = 1 << 20
"""Characters of the longest text that is looked at."""


_LATER: dict[str, dict[str, Any]] = {
    "Case": {"sampling": None, "kernel": None},
    "ModelSpec": {"own": None},
    "UserModelSpec": {"names": ""},
    "BatchLayout": {"lists": ()},
    "StepSpec": {"noise_multiplier": 0.0, "clip_groups": "all"},
    "Arithmetic": {"compute": "dtype", "world_factors": 1},
}
"""Fields, by the class they are in, that came after version 2 was frozen: written only where they differ from this."""


def encode(case: Case, version: int) -> str:
    """The case as one line of JSON, every field written out but later ones that say nothing."""
    data = dataclasses.asdict(case)
    parts = [(data, case), *((data[key], getattr(case, key)) for key in ("model", "layout", "step", "arithmetic"))]
    parts += [(data["model"]["own"], case.model.own)] if case.model.own is not None else []
    for own, part in parts:
        for name, default in _LATER[type(part).__name__].items():
            if own[name] == default:
                del own[name]
    return json.dumps({"version": version, **data}, separators=(",", ":"), allow_nan=False)


def decode(kind: type[Case], text: str, version: int) -> Case:
    """The inverse of ``encode``. Any text gives a valid case or InvalidCase; nothing of it is ever run."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        refuse("the text", "not a string, or a very long one", f"a string of at most {_LONGEST} characters")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidCase(f"the case: got text that is no JSON ({error}); was it cut short? copy it whole") from None
    if not isinstance(data, dict) or type(data.get("version")) is not int:
        refuse("the case", type(data).__name__ + " without a version", f'an object with "version": {version}')
    found = data.pop("version")
    if found != version:
        refuse("the case's version", found, f"{version}, the one this release reads; use a matching release")
    case: Case = _value(kind, data, "case")
    return case


def describe(case: Case) -> str:
    """The case in words, a few lines, no line break at the end."""
    if case.sampling is not None:
        return case_sampling.describe(case, case.sampling)
    if case.kernel is not None:
        return case_kernel.describe(case.kernel, case.seed)
    lines = _describe_model(case.model), _describe_ranks(case), _describe_step(case), _describe_numbers(case)
    return "\n".join(lines)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _value(kind: Any, data: Any, where: str) -> Any:
    """``data`` as a value of the annotated type ``kind``, or InvalidCase naming the field."""
    if dataclasses.is_dataclass(kind):
        return _object(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        if type(data) is not str or data not in arguments:
            refuse(where, data, f"one of {', '.join(arguments)}")
        return data
    if origin is types.UnionType and types.NoneType not in arguments:
        if type(data) not in arguments or (type(data) is float and not math.isfinite(data)):
            refuse(where, data, "a finite number")
        return data
    if origin is types.UnionType:
        return None if data is None else _value(arguments[0], data, where)
    if origin is tuple:
        return _tuple(arguments, data, where)
    if type(data) is not kind or (kind is float and not math.isfinite(data)):
        refuse(where, data, f"a value of type {kind.__name__}")
    return data


def _object(kind: Any, data: Any, where: str) -> Any:
    fields = typing.get_type_hints(kind)
    if not isinstance(data, dict):
        refuse(where, data, "an object")
    later = _LATER.get(kind.__name__, {}).keys()
    if data.keys() | later != fields.keys():
        unknown, missing = sorted(data.keys() - fields.keys()), sorted(fields.keys() - data.keys() - later)
        refuse(where, f"unknown keys {unknown}, missing keys {missing}", f"exactly {', '.join(fields)}")
    return kind(**{name: _value(fields[name], data[name], f"{where}.{name}") for name in fields if name in data})


def _tuple(arguments: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        refuse(where, data, "a list")
    kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
    if len(kinds) != len(data):
        refuse(where, data, f"a list of {len(kinds)}")
    return tuple(_value(kinds[index], item, f"{where}[{index}]") for index, item in enumerate(data))


def _describe_user_model(own: UserModelSpec) -> str:
    units = f"units {', '.join(own.units)}" if own.units else "no inner unit"
    return (
        f"model: your own {own.build}, {len(own.rows)} parameters, on {own.batch}; {units}, the rest left to the root"
    )


def _describe_model(spec: ModelSpec) -> str:
    if spec.own is not None:
        return _describe_user_model(spec.own)
    indices = spec.input in ("tokens", "bags")
    shape = (spec.length,) if indices else body_input(spec)
    parts = [f"{spec.input} inputs [{', '.join(map(str, ('B', *shape)))}]"]
    for stage in stages(spec):
        parts += ["Flatten"] * stage.flatten + [_describe_stage(spec, stage)]
        if stage.spec is not None and stage.spec.activation != "identity":
            parts.append(stage.spec.activation)
    tied = "" if spec.tied is None else f"; layers {spec.tied[0]} and {spec.tied[1]} share one weight"
    left = len(spec.layers) + spec.has_front - sum(spec.units)
    units = f"units of {', '.join(map(str, spec.units))} layers" if spec.units else "no inner unit"
    return f"model: {' -> '.join(parts)}{tied}; {units}, {left} left to the root"


_MODULES = {
    "embedding": "Embedding", "embedding_bag": "EmbeddingBag", "linear": "Linear", "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm", "group_norm": "GroupNorm", "attention": "Attention",
}  # fmt: skip
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _describe_stage(spec: ModelSpec, stage: Stage) -> str:
    """As torch prints the module: "Conv2d(1, 4, kernel=3, padding=1, bias, weight frozen)"."""
    layer = stage.spec
    if layer is None:
        padding = "" if spec.padding_idx is None else f", padding_idx={spec.padding_idx}"
        return f"{_MODULES[stage.kind]}({', '.join(map(str, stage.weights[0]))}{padding})"
    frozen = f", {layer.frozen} frozen" if layer.frozen != "none" else ""
    if layer.kind == "conv":
        window = "".join(f", {name}={v}" for name, d in _DEFAULTS.items() if (v := getattr(layer, name)) != d)
        name = f"Conv{SPATIAL[spec.input]}d({stage.entering[0]}, {layer.width}, kernel={layer.kernel}{window}"
        return f"{name}{', bias' * layer.bias}{frozen})"
    sizes = {"linear": f"{stage.entering[-1]}, {layer.width}", "group_norm": f"{layer.groups}, {layer.width}"}
    bias = ", bias" * (layer.bias and layer.kind in ("linear", "attention"))
    bias += ", no bias" * (not layer.bias and layer.kind == "layer_norm")
    return f"{_MODULES[layer.kind]}({sizes.get(layer.kind, layer.width)}{bias}{frozen})"


def _describe_ranks(case: Case) -> str:
    mesh, layout, step = case.mesh, case.layout, case.step
    axes = f" (dp_shard {mesh.dp_shard} x dp_replicate {mesh.dp_replicate})" if mesh.dp_replicate > 1 else ""
    kept = "" if mesh.reshard_after_forward else ", parameters kept unsharded after forward"
    how = layout.kind + " shuffled" * layout.shuffle + " drop_last" * layout.drop_last
    how += f" {list(map(list, layout.lists))}" if layout.lists else ""
    sizes = "+".join(map(str, case.local_sizes))
    chunks = f", in {step.micro_batches} micro-batches, gradients reduced " if step.micro_batches > 1 else ""
    chunks += ("after each" if step.sync_every else "after the last") if chunks else ""
    return f"ranks: W = {case.world_size}{axes}{kept}; a batch of {layout.batch_size} samples, {how} as {sizes}{chunks}"


def _describe_step(case: Case) -> str:
    step, optimizer = case.step, case.step.optimizer
    what = "plain training"
    if step.private:
        what = f"private, clipping family {step.clipping}, C = {step.clip_norm}, {step.norms} norms"
        what += f", noise multiplier {step.noise_multiplier}" if step.noise_multiplier else ""
        what += ", each unit and the root for themselves" if step.clip_groups == "units" else ""
        what += f", {step.contribution} contributions" if step.contribution != "complete" else ""
    elif step.max_grad_norm is not None:
        what += f", global gradient norm clipped to {step.max_grad_norm}"
    rule = f"{optimizer.kind} lr={2.0**-optimizer.lr_exponent}"
    rule += f" momentum={optimizer.momentum}" if optimizer.momentum else ""
    rule += f" weight_decay={optimizer.weight_decay}" if optimizer.weight_decay else ""
    rule += ", halved after each step" if optimizer.schedule == "halving" else ""
    rule += ", its state saved and loaded after each step" if step.resume else ""
    count = f"{step.steps} step" + "s" * (step.steps > 1)
    own = case.model.own
    kind = own.loss if own is not None and own.loss else step.loss
    loss = f"{kind} loss, {step.reduction} over samples, normaliser {step.normaliser}"
    return f"step: {count}, {what}; {loss}; {rule}"


def _describe_numbers(case: Case) -> str:
    rule = case.arithmetic
    kind = "real numbers" if rule.numbers == "real" else "integers"
    kind += " and surrogates" if "surrogates" in case.requires() else ""
    more = ", projected to integers after each step" if rule.project else ""
    more += ", averages premultiplied by 1/W" if rule.averaging == "premultiply" else ""
    more += f", losses times W**{rule.world_factors}" if rule.world_factors != 1 else ""
    ranges = f"weights in +-{rule.weights}, inputs in +-{rule.inputs}"
    dtype = rule.dtype + f", the model computes in {rule.compute}" * (rule.compute != "dtype")
    return f"numbers: {dtype}, {kind}, {ranges}{more}; seed {case.seed}"
