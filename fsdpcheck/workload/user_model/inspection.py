"""Looking at a user's own model, batch and loss before any case is drawn: what they demand, and what cannot be checked.

Everything that would later look like a finding of the implementation, but is the model's, ends here as a UsageError of
one message: got, wanted, next. Comparisons are of bits: the same shapes run through the same kernels.

Legend: n samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.case import Trait, UserModelSpec
from fsdpcheck.errors import UsageError, excerpt
from fsdpcheck.exact import surrogates
from fsdpcheck.loading import references
from fsdpcheck.process_state.seeds import fixed_seeds
from fsdpcheck.workload.clip_groups import INSTRUMENT, is_instrument
from fsdpcheck.workload.user_model import batch_dependence, optimizer_inspection, spelled_out
from fsdpcheck.workload.user_model import loading as user_model
from fsdpcheck.workload.user_model import single_device as alone
from fsdpcheck.workload.user_model import units as user_model_units

_TRIED = 4
"""Samples of a forward in which one is exchanged for another."""
_MIXING = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)
_LAYERS: dict[type[nn.Module], Trait | None] = {
    nn.Linear: None, nn.Embedding: "tokens", nn.EmbeddingBag: "bags", nn.Conv1d: "conv", nn.Conv2d: "conv",
    nn.Conv3d: "conv", nn.LayerNorm: "layer-norm", nn.GroupNorm: "group-norm", nn.RMSNorm: "rms-norm",
}  # fmt: skip
"""Layers with parameters that cases have too, and the trait each one is."""


class Seen(NamedTuple):
    """``own`` for cases; ``fails_on_none``: what the model raises on no samples, "" if nothing; what it does alone."""

    own: UserModelSpec
    fails_on_none: str
    alone: alone.Stepped

    @property
    def left_out(self) -> frozenset[Trait]:
        """Traits of cases that are not drawn on this model, which cannot take them.

        Nor per-layer clipping, which would need an instrument inside each of its units.
        """
        found: set[Trait] = {"per-layer-clipping"}
        if self.alone.fails_in_float32:
            found.add("float32")
        if self.fails_on_none:
            found.add("empty-rank")
        return frozenset(found)

    def too_wide(self, real: bool) -> frozenset[Trait]:
        """Traits of cases for whose numbers there are no bits, where the model computes in the dtype that is drawn."""
        return frozenset() if real or self.own.names else frozenset({"float32"})

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: what was seen, and which cases are left out."""
        units = ", ".join(self.own.units) if self.own.units else "none (--units names some)"
        found = [f"model {self.own.build}: {len(self.own.rows)} parameter tensors; units beside the root: {units}"]
        if self.fails_on_none:
            found.append(f"cases with a rank without samples are left out, for the model raises: {self.fails_on_none}")
        if self.own.names:
            drawn = "in float32, or widened to float64," if self.own.widened else "in float32,"
            found.append(f"cases are drawn {drawn} for the model computes in {self.own.names}: {self.alone.where}")
        if self.alone.fails_in_float32:
            found.append(f"cases in float32 are left out, for the model raises: {self.alone.fails_in_float32}")
        return tuple(found)


def inspect(build: str, batch: str, loss: str = "", units: Sequence[str] | None = None, optimizer: str = "") -> Seen:
    """Look at what references name. ``units``: names of modules to shard; None chooses them (see
    workload/user_model/units.py).

    Raises UsageError for whatever could not be checked honestly.
    """
    named = (build, batch, loss, optimizer)
    build, batch, loss, optimizer = (references.canonical(ref) if ref else "" for ref in named)
    model = _built(build)
    _require_parameters(build, model)
    _require_plain_layers(build, model)
    inputs, targets = _batch(batch)
    outputs = _require_separate_samples(build, model, inputs)
    _require_loss(loss, outputs, targets)
    chosen = user_model_units.chosen(build, model) if units is None else user_model_units.named(build, model, units)
    stepped = alone.stepped(build, loss, inputs, targets)
    if not stepped.names and not stepped.fails_in_float32:  # what computes in one dtype only shows no roundings
        batch_dependence.require_separate(build, loss, inputs, targets)
    if optimizer:
        optimizer_inspection.require_elementwise(optimizer, build)
    traits = frozenset(_traits(model, inputs, chosen)) | _of_functions(build, model, inputs[:2], targets[:2], loss)
    own = UserModelSpec(
        build=build,
        batch=batch,
        loss=loss,
        units=chosen,
        rows=tuple(value.shape[0] for value in user_model.values(build).values()),
        features=outputs[0].numel(),
        targets=targets[0].numel(),
        traits=tuple(sorted(traits)),
        names=stepped.names,
        optimizer=optimizer,
    )
    return Seen(own, _fails_on_none(model, inputs), stepped)


def _refuse(what: str, got: object, wanted: str, then: str) -> NoReturn:
    raise UsageError(f"{what}\n  got     {got}\n  wanted  {wanted}\n  next    {then}")


def _called(what: str, function: Callable[[], Any]) -> Any:
    """What a user's function gives; what it raises is a usage error, not one of fsdpcheck."""
    try:
        return function()
    except UsageError:
        raise
    except Exception as error:
        _refuse(f"{what} raised", f"{excerpt.kind(error)}: {excerpt.said(error)}", "a value", "run it by itself")


def _built(build: str) -> nn.Module:
    one, two = (_called(f"model {build!r}", functools.partial(user_model.built, build)) for _ in range(2))
    if not isinstance(one, nn.Module):
        _refuse(f"model {build!r} built no module", type(one).__name__, "a torch.nn.Module", "return the model")
    kept, again = one.state_dict(), two.state_dict()
    differing = [name for name in (*kept, *again) if not _same(kept.get(name), again.get(name))]
    if differing:
        _refuse(
            f"model {build!r} is built differently each time",
            f"two builds that differ in {differing[0]}",
            "equal parameters and buffers; torch, numpy and random are seeded before each build",
            "draw nothing from the clock or the system",
        )
    return _called(f"copying model {build!r}", functools.partial(user_model.model, build))  # type: ignore[no-any-return]


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    """Equal bits; NaN is itself."""
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
        return False
    return bool(torch.equal(one, two) or (torch.equal(one.nan_to_num(), two.nan_to_num()) and one.isnan().any()))


def _require_parameters(build: str, model: nn.Module) -> None:
    named = dict(model.named_parameters())
    if not any(value.requires_grad for value in named.values()):
        _refuse(
            f"model {build!r} has nothing to train",
            f"{len(named)} parameter tensors",
            "a trainable one",
            "unfreeze some",
        )
    for name, value in named.items():
        if not value.is_floating_point():
            then = "keep such values in a buffer, or use real parameters"
            _refuse(f"parameter {name} is not floating-point", value.dtype, "float32 or float64", then)
        if value.device.type != "cpu":
            _refuse(
                f"parameter {name} is not on the CPU", value.device, "a model with values on the CPU", "build there"
            )
        if is_instrument(f"model.{name}"):
            wanted = f"another name than {INSTRUMENT}, which is that of the instrument beside the model"
            _refuse(f"parameter {name} of model {build!r} has a name that is taken", name, wanted, "rename the module")
        if not value.dim():
            _refuse(f"parameter {name} has no dimension", "a scalar", "[1] or more: FSDP shards dim 0", "reshape it")


def _require_plain_layers(build: str, model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, _MIXING):
            then = "use GroupNorm or LayerNorm: per-sample gradients, and equality with one device, do not exist here"
            _refuse(f"layer {name} mixes samples", type(module).__name__, "layers that treat each sample alone", then)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 and module.training:
            then = "set p=0 in the configuration, or return model.eval()"
            wanted = "no random numbers in the forward: ranks and one device would draw different ones"
            _refuse(f"layer {name} drops at random", f"{type(module).__name__}(p={module.p}) in training", wanted, then)


def _batch(batch: str) -> tuple[Tensor, Tensor]:
    """(inputs, targets) of the samples that are needed."""
    needed, then = user_model.NEEDED, "stack samples along dim 0"
    one, two = (_called(f"batch {batch!r}", functools.partial(user_model.drawn, batch, needed)) for _ in range(2))
    pair = isinstance(one, (tuple, list)) and len(one) == 2 and all(isinstance(part, Tensor) for part in one)
    if not pair:
        got = [type(part).__name__ for part in one] if isinstance(one, (tuple, list)) else type(one).__name__
        then = "wrap a model of several inputs in a module that takes one tensor; dicts and lists are not supported"
        _refuse(f"batch {batch!r} is no pair of tensors", got, "(inputs, targets), one tensor each", then)
    for name, part, again in zip(("inputs", "targets"), one, two, strict=True):
        if not part.dim() or part.shape[0] < needed:
            axis = next((number for number, size in enumerate(part.shape) if size >= needed), None)
            hint = "" if axis is None else f"; dim {axis} has {part.shape[axis]}: is that the sample axis?"
            wanted = f"at least {needed} samples along dim 0 (nine a step, three steps)"
            then = "make batch(n) give n samples" if axis is None else then
            _refuse(f"the {name} of {batch!r} are too few", f"shape {list(part.shape)}{hint}", wanted, then)
        if not _same(part, again):
            wanted = "equal samples each time; torch, numpy and random are seeded before"
            _refuse(f"batch {batch!r} gives other {name} each time", "two that differ", wanted, "seed what it draws")
    if len(one[0]) != len(one[1]):
        _refuse(f"batch {batch!r} is uneven", f"{len(one[0])} inputs, {len(one[1])} targets", "a target an input", then)
    return one[0].detach(), one[1].detach()


@torch.no_grad()
def _require_separate_samples(build: str, model: nn.Module, inputs: Tensor) -> Tensor:
    """The outputs of the first samples. They must depend on their own sample, and on nothing else."""
    some = inputs[:_TRIED]
    first, traced = _traced(f"model {build!r}", model, some, 0)
    if not isinstance(first, Tensor) or not first.dim() or first.shape[0] != len(some) or not first.is_floating_point():
        got = f"{first.dtype} {list(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        wanted = f"one floating-point tensor with the {len(some)} samples along dim 0"
        _refuse(f"model {build!r} gives no output a sample", got, wanted, "wrap it in a module that returns the logits")
    again, retraced = _traced(f"model {build!r}", model, some, 1)
    if not _same(first, again):
        where = _first_other(traced, retraced, slice(None))
        _refuse(f"model {build!r} is random{where}", "another output under another seed", "the same", "drop nothing")
    _require_unchanged(build, model)
    other = next((row for row in range(_TRIED, len(inputs)) if not _same(inputs[row], inputs[_TRIED - 1])), None)
    if other is None:
        _refuse("the samples are all alike", "equal inputs", "samples that differ", "or nobody would see a swap")
    others = torch.cat([some[:-1], inputs[other : other + 1]])
    exchanged, retraced = _traced(f"model {build!r}", model, others, 0)
    if not _same(first[:-1], exchanged[:-1]) and not batch_dependence.only_rounds(build, some, others):
        where = _first_other(traced, retraced, slice(None, _TRIED - 1))
        got = "other outputs of three samples when a fourth was exchanged"
        _refuse(f"model {build!r} mixes samples{where}", got, "outputs of a sample alone", "normalise within samples")
    _called(f"model {build!r} on one sample", lambda: model(inputs[:1]))
    return first


def _traced(what: str, model: nn.Module, inputs: Tensor, seed: int) -> tuple[Any, list[tuple[str, Tensor]]]:
    """(output, outputs of the innermost modules in the order they ran)."""
    found: list[tuple[str, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():
        if not list(module.children()):
            hooks.append(module.register_forward_hook(functools.partial(_note, found, name)))
    try:
        with fixed_seeds(seed):
            return _called(what, lambda: model(inputs)), found
    finally:
        for hook in hooks:
            hook.remove()


def _note(found: list[tuple[str, Tensor]], name: str, module: nn.Module, _: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        found.append((f"{name} ({type(module).__name__})", output.detach().clone()))


def _first_other(one: list[tuple[str, Tensor]], two: list[tuple[str, Tensor]], rows: slice) -> str:
    """Where two forwards part first: " in layer NAME (Kind)", or nothing when no module shows it."""
    for (name, a), (_, b) in zip(one, two, strict=False):
        if not _same(a[rows] if a.dim() else a, b[rows] if b.dim() else b):
            return f", first in layer {name}"
    return ""


def _require_unchanged(build: str, model: nn.Module) -> None:
    fresh = user_model.model(build).state_dict()
    changed = [name for name, value in model.state_dict().items() if not _same(value, fresh.get(name))]
    if changed:
        wanted = "a forward that leaves parameters and buffers as they are"
        then = "return model.eval(), or remove what keeps statistics"
        _refuse(f"the forward of model {build!r} changes {changed[0]}", "another value behind it", wanted, then)


def _require_loss(ref: str, outputs: Tensor, targets: Tensor) -> None:
    """Losses are one a sample, of the tried ones, and depend on nothing else."""
    some, name = targets[:_TRIED], f"loss {ref!r}" if ref else "the built-in loss"
    wanted = [*outputs.shape] if targets.is_floating_point() else [*outputs.shape[:-1]]
    if not ref and list(some.shape) != wanted:
        kind = "the squared error" if targets.is_floating_point() else "cross-entropy over the last dim"
        got = f"targets {list(some.shape)} for outputs {list(outputs.shape)}"
        _refuse(f"targets do not fit {kind}", got, f"targets {wanted}", "change them, or give --loss")
    function = user_model.loss(ref)
    losses = _called(name, lambda: function(outputs, some))
    if not isinstance(losses, Tensor) or list(losses.shape) != [_TRIED] or not losses.is_floating_point():
        got = f"shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        _refuse(
            f"{name} gives no loss a sample", got, f"per-sample losses [{_TRIED}]", 'use reduction="none", then sum'
        )
    changed = torch.cat([outputs[:-1], outputs[:1] + 1])
    if not _same(losses[:-1], _called(name, lambda: function(changed, some))[:-1]):
        _refuse(f"{name} mixes samples", "other losses when one output changed", "a loss a sample", "do not average")


def _fails_on_none(model: nn.Module, inputs: Tensor) -> str:
    """What a forward of no samples raises; empty if it runs."""
    try:
        model(inputs[:0])
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    return ""


def _traits(model: nn.Module, inputs: Tensor, units: Sequence[str]) -> Iterator[Trait]:
    """What the modules of a model demand."""
    named, every = dict(model.named_parameters()), list(model.named_parameters(remove_duplicate=False))
    if len(every) > len(named):
        yield "tied"
    if not all(value.requires_grad for value in named.values()):
        yield "frozen"
    if not all(any(name.startswith(f"{unit}.") for unit in units) for name in named):
        yield "root-parameters"
    for module in model.modules():
        owned = list(module.named_parameters(recurse=False))
        if type(module) in _LAYERS:
            yield from _of_layer(module)
        elif owned:
            yield "own-layers"
            if isinstance(module, nn.MultiheadAttention):
                yield "attention"
        if any(name.endswith("bias") for name, _ in owned):
            yield "bias"
    if inputs.dim() > 2 or not inputs.is_floating_point():
        yield "sequence"


def _of_layer(module: nn.Module) -> Iterator[Trait]:
    trait = _LAYERS[type(module)]
    yield from [trait] if trait is not None else []
    if getattr(module, "padding_idx", None) is not None:
        yield "padding_idx"
    if isinstance(module, nn.LayerNorm) and module.bias is None:
        yield "layer-norm-without-bias"


class _Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class _Composites(TorchFunctionMode):
    """Names of the functions of torch that are called inside: of those above autograd nothing is left below it.

    And whether one of them is spelled out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.spelled_out = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        if (marked := spelled_out.marked(func, args, kwargs or {})) is not None:
            return marked
        self.spelled_out = self.spelled_out or spelled_out.in_place_of(func, args, kwargs or {}) is not None
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _of_functions(build: str, model: nn.Module, inputs: Tensor, targets: Tensor, loss: str) -> frozenset[Trait]:
    """What the operators of forward and loss demand: surrogates, a norm rule for attention, a forward to run again."""
    with _Names() as seen, _Composites() as called:
        outputs = model(inputs)
        private: set[Trait] = {"spelled-out-private"} if called.spelled_out else set()
        user_model.loss(loss)(outputs, targets)
    known = {name.partition(".")[0] for name in surrogates.KERNELS} | {"_fused_rms_norm", "_safe_softmax"}
    attention = any("dot_product" in name for name in seen.names)
    found: set[Trait] = {"attention"} if attention else set()
    surrogate = (
        attention
        or spelled_out.tables(build)
        or seen.names & known
        or called.names & surrogates.COMPOSITES.keys()
        or called.spelled_out
    )
    return frozenset(found | private | ({"surrogates"} if surrogate else set()))
