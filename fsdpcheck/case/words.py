"""Words for people: a training case in a few lines. Used by ``TrainingCase``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdpcheck.case.shapes import SPATIAL, Stage, body_input, stages

if TYPE_CHECKING:
    from fsdpcheck.case.model import ModelSpec, UserModelSpec
    from fsdpcheck.case.training import TrainingCase


def describe(case: TrainingCase) -> str:
    """The case in words, a few lines, no line break at the end."""
    lines = _describe_model(case.model), _describe_ranks(case), _describe_step(case), _describe_numbers(case)
    return "\n".join(lines)


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
    units += ", of one layer the layer itself" * spec.bare_units
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
        mean = ", mean" * (spec.bags == "mean")
        return f"{_MODULES[stage.kind]}({', '.join(map(str, stage.weights[0]))}{mean}{padding})"
    frozen = f", {layer.frozen} frozen" if layer.frozen != "none" else ""
    if layer.kind == "conv":
        window = "".join(f", {name}={v}" for name, d in _DEFAULTS.items() if (v := getattr(layer, name)) != d)
        window += ', padding="same"' * layer.same
        window += f', padding_mode="{layer.padding_mode}"' * (layer.padding_mode != "zeros")
        name = f"Conv{SPATIAL[spec.input]}d({stage.entering[0]}, {layer.width}, kernel={layer.kernel}{window}"
        return f"{name}{', bias' * layer.bias}{frozen})"
    sizes = {"linear": f"{stage.entering[-1]}, {layer.width}", "group_norm": f"{layer.groups}, {layer.width}"}
    frozen += {
        "once": "",
        "routed": ", left out by some samples",
        "twice": ", run twice",
        "for all": ", one row of it added to all samples",
        "dropped": ", its output unused",
        "beside": ", its weight used once more beside it",
        "across": ", its output for a sample added to the next one's",
        "reordered": ", given the samples in another order",
    }[layer.used]
    bias = ", bias" * (layer.bias and layer.kind in ("linear", "attention"))
    bias += ", no bias" * (not layer.bias and layer.kind == "layer_norm")
    if layer.heads:
        bias += {
            "none": "",
            "causal": ", causal",
            "keys": ", keys of each sample left out",
            "both": ", causal, keys of each sample left out",
        }[layer.mask]
        return f"MultiheadAttention({layer.width}, {layer.heads}{bias}{frozen})"
    return f"{_MODULES[layer.kind]}({sizes.get(layer.kind, layer.width)}{bias}{frozen})"


def _describe_ranks(case: TrainingCase) -> str:
    mesh, layout, step = case.mesh, case.layout, case.step
    axes = f" (dp_shard {mesh.dp_shard} x dp_replicate {mesh.dp_replicate})" if mesh.dp_replicate > 1 else ""
    if mesh.axes:
        axes = f" ({' x '.join(f'{axis} {size}' for axis, size in mesh.sizes.items())})"
    kept = "" if mesh.reshard_after_forward else ", parameters kept unsharded after forward"
    how = layout.kind + " shuffled" * layout.shuffle + " drop_last" * layout.drop_last
    how += f" {list(map(list, layout.lists))}" if layout.lists else ""
    sizes = "+".join(map(str, case.local_sizes[:: mesh.model_ranks]))
    chunks = f", in {step.micro_batches} micro-batches, gradients reduced " if step.micro_batches > 1 else ""
    chunks += ("after each" if step.sync_every else "after the last") if chunks else ""
    if step.unequal:
        fewer = sorted({rank // mesh.model_ranks for rank in range(mesh.world_size) if case.has_fewer(rank)})
        chunks += f", one fewer for share{'s' * (len(fewer) > 1)} {', '.join(map(str, fewer))}"
    return f"ranks: W = {case.world_size}{axes}{kept}; a batch of {layout.batch_size} samples, {how} as {sizes}{chunks}"


def _describe_step(case: TrainingCase) -> str:
    step = case.step
    what = "plain training"
    if step.private:
        what = f"private, clipping family {step.clipping}, C = {step.clip_norm}, {step.norms} norms"
        what += f", noise multiplier {step.noise_multiplier}" if step.noise_multiplier else ""
        what += ", noise of the secure generator" if step.secure_noise else ""
        what += ", each unit and the root for themselves" if step.clip_groups == "units" else ""
        what += f", {step.contribution} contributions" if step.contribution != "complete" else ""
    elif step.max_grad_norm is not None:
        what += f", global gradient norm clipped to {step.max_grad_norm}"
    rule = _describe_optimizer(case)
    rule += ", its state saved and loaded after each step" if step.resume else ""
    count = f"{step.steps} step" + "s" * (step.steps > 1)
    if step.evaluates != "no":
        count += f", each behind an evaluation in {step.evaluates}"
    count += ", after another model's" * step.rebuilds
    count += ", all that is frozen thawed behind the first" * step.thaws
    count += ", and frozen again behind the second" * step.refreezes
    own = case.model.own
    kind = own.loss if own is not None and own.loss else step.loss
    across = "" if step.across == "nothing" else f" of the {step.across} of a sample and of the one before"
    loss = f"{kind} loss{across}, {step.reduction} over samples, normaliser {step.normaliser}"
    return f"step: {count}, {what}; {loss}; {rule}"


def _describe_optimizer(case: TrainingCase) -> str:
    optimizer, own = case.step.optimizer, case.model.own
    if optimizer.kind == "own" and own is not None:
        return f"your own optimizer {own.optimizer}"
    rule = f"{optimizer.kind} lr={2.0**-optimizer.lr_exponent}"
    rule += f" momentum={optimizer.momentum}" if optimizer.momentum else ""
    rule += f" weight_decay={optimizer.weight_decay}" if optimizer.weight_decay else ""
    rule += ", halved after each step" if optimizer.schedule == "halving" else ""
    apart = {"one": "", "vectors apart": "vectors", "last unit apart": "the last unit"}[optimizer.groups]
    return rule + f", {apart} without decay at half the rate" * bool(apart)


def _describe_numbers(case: TrainingCase) -> str:
    rule = case.arithmetic
    kind = "real numbers" if rule.numbers == "real" else "integers"
    kind += " and surrogates" if "surrogates" in case.requires() else ""
    more = ", projected to integers after each step" if rule.project else ""
    more += ", averages premultiplied by 1/W" if rule.averaging == "premultiply" else ""
    more += f", losses times W**{rule.world_factors}" if rule.world_factors != 1 else ""
    ranges = f"weights in +-{rule.weights}, inputs in +-{rule.inputs}"
    dtype = rule.dtype + f", the model computes in {rule.compute}" * (rule.compute != "dtype")
    return f"numbers: {dtype}, {kind}, {ranges}{more}; seed {case.seed}"
