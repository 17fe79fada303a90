"""An adapter made of functions that a training repository has: how it parallelizes a model, and what else is its own.

``parallelize(model, mesh)`` makes a model parallel, in place or not, and returns it. ``step(model, optimizer, batches,
loss)`` is one optimizer step: ``batches`` are this rank's micro-batches as (inputs, targets), and ``loss(outputs,
targets)`` a 0-dim loss, such that averaging the gradients of ranks with samples of their own is right. ``clip(model,
max_norm)`` clips by the global gradient norm and returns it. ``save(model, optimizer, folder)`` writes all that a
training needs to go on into ``folder``, which is there and empty; ``load(model, optimizer, folder)`` takes it over into
a new model, made parallel, and its new optimizer. ``read(model, folder)`` fills an ordinary model from it, in a process
of its own, as whoever exports one does. A reference names all of them in one module:
"train.py:parallelize,step=train_step,clip=clip,save=save,load=load,axes=dp_shard+tp,averaging=before". ``keeps=shards``
says that between steps each rank keeps its share of the parameters, as ``fully_shard`` has it, and ``keeps=units`` that
besides of the case's units those that are at work are gathered, and no others.

No first forward is in ``torch.inference_mode``: ``fully_shard`` cannot train behind it, whoever calls it
(docs/upstream/fully_shard_first_forward_in_inference_mode.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast, get_args

from torch import nn

from fsdpcheck.adapters import user_private
from fsdpcheck.adapters.contract import ArithmeticRule, Features, Promise, Setup, Snippets
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, mesh_of
from fsdpcheck.adapters.user_dtypes import Dtypes
from fsdpcheck.adapters.user_loop import Built, Loop, fill_beside
from fsdpcheck.case import Trait
from fsdpcheck.case.axes import Axis
from fsdpcheck.case.traits import not_in_low_precision
from fsdpcheck.errors import AdapterError, explain, spelling

FUNCTIONS: Final = ("step", "clip", "private", "save", "load", "read")
_REASONS: Final = {
    "state": "no functions of yours save and load: --save and --load name them",
    "global-norm": "your own step is not asked to clip, and the dtype that was said is that of your step",
    "resharded": "no functions of yours save and load at other numbers of ranks",
    "thawing": "your own model has frozen parameters or has not, and who thaws them is up to you",
    "sharded": "nobody says that ranks keep shards: --keeps shards does",
    "memory": "nobody says that only units at work are gathered: --keeps units does",
    "padding": "shows no padding",
    "lifecycle": "announces no moments at which parameters are gathered and freed",
    "hooks": "your own functions may wrap modules, whose hooks then are yours",
    "parameter-hooks": "when your own functions reduce is not said",
    "interrupts": "your own functions need no way back from a step that raised",
    "epochs": "your own batches come from you: no sampler is judged",
    "features": "the features are those of the adapter fully_shard",
    "readable": "no function of yours fills an ordinary model: --read names it",
    "stored": "what lies in files of your own is up to you: how a training goes on from them is judged",
}
_REPLICAS: Final = frozenset({"dp_replicate", "dp_shard"})
_KNOWN: Final = {
    "averaging": ("after", "before", "none"),
    "load-at": ("any", "same"),
    "keeps": ("", "shards", "units"),
    "param-dtype": ("", "float32", "bfloat16", "autocast"),
    "reduce-dtype": ("", "float32"),
}
"""What may be said of how the functions compute and load; the first unless something is."""
WORDS: Final = ("axes", "factor", "shows", *_KNOWN)


def told(attr: str) -> dict[str, str]:
    """The parts that the attribute of a reference names, that of ``parallelize`` by this name.

    Raises AdapterError for a part that there is none of.
    """
    first, *others = attr.split(",")
    found = {"parallelize": first}
    for part in others:
        key, equals, value = part.partition("=")
        if key not in (*FUNCTIONS, *WORDS) or not equals or not value:
            wanted = ", ".join(f"{name}=NAME" for name in (*FUNCTIONS, *WORDS))
            then = f"see docs/user-models.md{spelling.hint(key, (*FUNCTIONS, *WORDS))}"
            raise AdapterError(explain("what stands after a parallelize function", got=part, wanted=wanted, then=then))
        found[key] = value
    return found


def adapter_of(name: str, functions: Mapping[str, Callable[..., Any]], words: Mapping[str, str]) -> UserParts:
    """The adapter of these parts. Raises AdapterError for words that say nothing."""
    axes = frozenset(words.get("axes", "dp_shard").split("+"))
    _require_known(name, "axes", axes, get_args(Axis))
    for kind, known in _KNOWN.items():
        _require_known(name, kind, {words.get(kind, known[0])}, known)
    arithmetic = _arithmetic(name, words)
    features = Features(
        promises=frozenset(
            {"plain", *_clips(functions, arithmetic), *_kept(name, functions, words), *_sharded(name, words, axes)}
        ),
        accepts=ORDINARY - _left_out(axes, functions) - _not_in(arithmetic),
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=arithmetic,
        axes=cast(frozenset[Axis], axes - {"dp_replicate"}),
        gauge=False,
        functions=True,
        reasons={**PLAIN_REASONS, **_REASONS},
    )
    return UserParts(name, _private(name, functions, words, features), functions)


def _clips(functions: Mapping[str, Callable[..., Any]], arithmetic: ArithmeticRule) -> frozenset[Promise]:
    """The ordinary loop clips, and computes in what it is given, whatever a step of the user's computes in."""
    judged: frozenset[Promise] = frozenset({"global-norm"})
    return judged if "step" not in functions or arithmetic.compute == "dtype" else frozenset()


def _private(
    name: str, functions: Mapping[str, Callable[..., Any]], words: Mapping[str, str], plain: Features
) -> Features:
    """The features of a private step, if there is one; ``plain``, if not. Raises AdapterError for words without it."""
    if "private" not in functions:
        if stray := next((word for word in ("factor", "shows") if word in words), ""):
            what, then = f"--{stray} of {name!r} is about a private step", "name it with --private"
            raise AdapterError(explain(what, got=words[stray], wanted="a private step", then=then))
        return plain
    if others := [key for key in ("step", "clip") if key in functions]:
        what, then = f"the steps of {name!r}", "check the two in two commands"
        raise AdapterError(explain(what, got=f"private and {others[0]}", wanted="one of them", then=then))
    if plain.arithmetic.compute != "dtype":
        what, then = f"the private step of {name!r}", "leave --param-dtype out, and compute in the parameters' own"
        raise AdapterError(explain(what, got=plain.arithmetic.compute, wanted="another --param-dtype", then=then))
    rule = user_private.rule_of(name, words)
    promises = user_private.promised(name, functions["private"], rule) | plain.promises - {"plain", "global-norm"}
    return replace(
        plain,
        promises=frozenset(promises),
        accepts=user_private.accepted(plain.accepts),
        observables=user_private.shown(name, words),
        owns_loss_scale=True,
        factor=rule,
        gauge=True,
        reasons={**plain.reasons, **user_private.PRIVATE_REASONS},
    )


def _kept(name: str, functions: Mapping[str, Callable[..., Any]], words: Mapping[str, str]) -> frozenset[Promise]:
    """What is promised of a checkpoint, if there is one."""
    if not _keeps(name, functions):
        return frozenset()
    told: dict[Promise, bool] = {
        "state": True, "resharded": words.get("load-at") != "same", "readable": "read" in functions
    }  # fmt: skip
    return frozenset(promise for promise, made in told.items() if made)


def _sharded(name: str, words: Mapping[str, str], axes: frozenset[str]) -> frozenset[Promise]:
    """What is promised of where parameters lie. Raises AdapterError where another axis shares them out too."""
    promised: dict[str, frozenset[Promise]] = {
        "shards": frozenset({"sharded"}), "units": frozenset({"sharded", "memory"})
    }  # fmt: skip
    kept = words.get("keeps", "")
    if kept and (others := sorted(axes - _REPLICAS)):
        what, then = f"--keeps {kept} of {name!r}", "leave it out: where shards of such a mesh lie is not judged"
        wanted = "dp_shard, with dp_replicate or without"
        raise AdapterError(explain(what, got=f"a mesh with {', '.join(others)}", wanted=wanted, then=then))
    return promised.get(kept, frozenset())


def _require_known(name: str, kind: str, got: Collection[str], known: Sequence[str]) -> None:
    for word in sorted(set(got) - set(known)):
        then = f"write one of them{spelling.hint(word, known)}"
        said = ", ".join(filter(None, known))
        raise AdapterError(explain(f"{kind} of {name!r}", got=word, wanted=said, then=then))


def _arithmetic(name: str, words: Mapping[str, str]) -> ArithmeticRule:
    """What is said of dtypes. Raises AdapterError for a model in bfloat16 whose gradients are reduced in it too."""
    averaging = cast(Any, words.get("averaging", "after"))
    computes, reduces = words.get("param-dtype", ""), words.get("reduce-dtype", "")
    if computes == "autocast":
        return ArithmeticRule(averaging, dtypes=("float32",), compute="bfloat16", autocast=True)
    if computes != "bfloat16":
        return ArithmeticRule(averaging, dtypes=("float32",)) if computes or reduces else ArithmeticRule(averaging)
    if not reduces:
        got = "param-dtype bfloat16 and no reduce-dtype: MixedPrecisionPolicy then reduces in bfloat16 too"
        wanted = "sums of gradients in float32, of which every bit is known in any order of ranks"
        then = "pass reduce_dtype=torch.float32, and say --reduce-dtype float32"
        raise AdapterError(explain(f"dtypes of {name!r}", got=got, wanted=wanted, then=then))
    return ArithmeticRule(averaging, dtypes=("float32",), compute="bfloat16")


def _not_in(arithmetic: ArithmeticRule) -> frozenset[Trait]:
    """Nobody asks functions for a precision that they do not have: they would be called right in float32. What is not
    averaged over ranks is no mean of means."""
    means = frozenset[Trait]({"mean"} if arithmetic.averaging == "none" else ())
    if arithmetic.compute == "dtype":
        return means | {"bfloat16", "tf32"}
    return means | not_in_low_precision(own=True) | {"tf32", "real"}


def _keeps(name: str, functions: Mapping[str, Callable[..., Any]]) -> bool:
    """Whether there is a checkpoint. Raises AdapterError for one half of it."""
    known = [half for half in ("save", "load") if half in functions]
    if "read" in functions and not known:
        what, then = f"the function of {name!r} that reads a checkpoint", "name them too: --save, --load"
        raise AdapterError(explain(what, got="read alone", wanted="save and load besides", then=then))
    if len(known) == 1:
        got, wanted = f"{known[0]} alone", "both, or neither: what is saved is judged by how a training goes on"
        then = f"name the other one too: --{'load' if known == ['save'] else 'save'}"
        raise AdapterError(explain(f"the checkpoint of {name!r}", got=got, wanted=wanted, then=then))
    return bool(known)


def _left_out(axes: frozenset[str], functions: Mapping[str, Callable[..., Any]]) -> set[Trait]:
    """Of the ordinary traits. No case says when a user's own step reduces: it is exact after any micro-batch."""
    told: dict[Trait, bool] = {"inference-mode": True, "no-sync": "step" in functions, "hsdp": not axes >= _REPLICAS}
    return {trait for trait, left_out in told.items() if left_out}


class UserParts:
    """Builds by ``parallelize``, and steps by ``step`` or an ordinary loop that clips by ``clip``."""

    def __init__(self, name: str, features: Features, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.name, self.features, self._functions = name, features, functions
        self.snippets = None if {"step", "private"} & functions.keys() else _snippets(functions["parallelize"])

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        """A user's own model is made parallel as the user knows it, without what the harness puts beside it."""
        is_private = "private" in self._functions
        given = self._given(model)
        before, dtypes = _looks(given), Dtypes(self.name, given, setup.compute_dtype, self.features.arithmetic.autocast)
        shapes = {key: value.shape for key, value in model.named_parameters()}
        mesh = mesh_of(setup, *(("dp_shard",) if self._has_data_axis else ()))
        made = self._functions["parallelize"](given, mesh)
        if made is None and setup.world_size > 1 and _looks(given) == before:
            then = "return the model that is to be trained, or change the given one in place"
            raise self._refusal("returned nothing and left the model as it was", "a module", then)
        if made is not None and not isinstance(made, nn.Module):
            raise self._refusal(f"returned {type(made).__name__}", "a module, or None", "return the model")
        made = given if made is None else made
        if given is not model:
            model.model = made
        built = Built(self.name, self._functions, made if given is model else model, made, given, dtypes, shapes)
        if is_private:
            return user_private.PrivateLoop(built, setup, self.features.observables)
        return Loop(built, setup)

    def read(self, folder: str, model: nn.Module) -> None:
        """By the user's function; what the harness has put beside their model comes back by itself."""
        self._functions["read"](self._given(model), folder)
        fill_beside(model, folder)

    def _given(self, model: nn.Module) -> nn.Module:
        """The model as its user knows it; in private steps the harness's layer belongs to the norm of a sample."""
        apart = hasattr(model, "own") and "private" not in self._functions
        return model.get_submodule("model") if apart else model

    @property
    def _has_data_axis(self) -> bool:
        return "dp_shard" in self.features.axes

    def _refusal(self, got: str, wanted: str, then: str) -> AdapterError:
        return AdapterError(explain(f"parallelize function {self.name!r}", got=got, wanted=wanted, then=then))


def _snippets(parallelize: Callable[..., Any]) -> Snippets | None:
    """How a program calls the function; None where it is in no file."""
    file = inspect.getsourcefile(parallelize)
    if file is None:
        return None
    folder, name = str(Path(file).parent), parallelize.__name__
    return Snippets(
        imports=f"from contextlib import nullcontext\nsys.path.insert(0, {folder!r})\n"
        f"from {Path(file).stem} import {name}",
        parallelize=f"parallel = {name}(model, mesh) or model",
        before='if hasattr(parallel, "set_requires_gradient_sync"):\n    parallel.set_requires_gradient_sync(reduces)',
        context='parallel.no_sync() if hasattr(parallel, "no_sync") and not reduces else nullcontext()',
        whole='whole = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.named_parameters()}',
    )


def _looks(model: nn.Module) -> list[object]:
    """What a function that makes a model parallel in place changes some of."""
    found: list[object] = []
    for module in model.modules():
        hooks = (len(module._forward_pre_hooks), len(module._forward_hooks), len(module._backward_hooks))
        found += [type(module), id(module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward)]
        found += [hooks, *(id(value) for value in module.parameters(recurse=False))]
    return found
