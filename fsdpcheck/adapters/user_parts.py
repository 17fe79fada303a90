"""An adapter made of functions that a training repository has: how it parallelizes a model, and what else is its own.

``parallelize(model, mesh)`` makes a model parallel, in place or not, and returns it. ``step(model, optimizer, batches,
loss)`` is one optimizer step: ``batches`` are this rank's micro-batches as (inputs, targets), and ``loss(outputs,
targets)`` a 0-dim loss, such that averaging the gradients of ranks with samples of their own is right. ``clip(model,
max_norm)`` clips by the global gradient norm and returns it. A reference names all of them in one module:
"train.py:parallelize,step=train_step,clip=clip,axes=dp_shard+tp,averaging=before".

No first forward is in ``torch.inference_mode``: ``fully_shard`` cannot train behind it, whoever calls it
(docs/upstream/fully_shard_first_forward_in_inference_mode.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, cast, get_args

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.contract import ArithmeticRule, Batch, Features, Promise, Setup, Snippets
from fsdpcheck.adapters.training_loop import ORDINARY, PLAIN_REASONS, TrainingLoop, mesh_of
from fsdpcheck.case import Trait
from fsdpcheck.case.axes import Axis
from fsdpcheck.errors import AdapterError, explain, spelling

FUNCTIONS: Final = ("step", "clip")
_REPLICAS: Final = frozenset({"dp_replicate", "dp_shard"})
WORDS: Final = ("axes", "averaging")
_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that wrappers of torch put in."""


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
    averaging = words.get("averaging", "after")
    for kind, got, known in (("axes", sorted(axes), get_args(Axis)), ("averaging", [averaging], ("after", "before"))):
        for word in got:
            if word not in known:
                then = f"write one of them{spelling.hint(word, known)}"
                raise AdapterError(explain(f"{kind} of {name!r}", got=word, wanted=", ".join(known), then=then))
    promises: frozenset[Promise] = frozenset({"plain", "global-norm"})
    features = Features(
        promises=promises,
        accepts=ORDINARY - _left_out(axes, functions),
        observables=frozenset({"params", "grads", "grad_norm"}),
        arithmetic=ArithmeticRule(averaging=cast(Any, averaging)),
        axes=cast(frozenset[Axis], axes - {"dp_replicate"}),
        gauge=False,
        reasons=PLAIN_REASONS,
    )
    return UserParts(name, features, functions)


def _left_out(axes: frozenset[str], functions: Mapping[str, Callable[..., Any]]) -> set[Trait]:
    """Of the ordinary traits. No case says when a user's own step reduces: it is exact after any micro-batch."""
    told: dict[Trait, bool] = {"inference-mode": True, "no-sync": "step" in functions, "hsdp": not axes >= _REPLICAS}
    return {trait for trait, left_out in told.items() if left_out}


class UserParts:
    """Builds by ``parallelize``, and steps by ``step`` or an ordinary loop that clips by ``clip``."""

    def __init__(self, name: str, features: Features, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.name, self.features, self._functions = name, features, functions
        self.snippets = None if "step" in functions else _snippets(functions["parallelize"])

    def build(self, model: nn.Module, setup: Setup) -> TrainingLoop:
        """A user's own model is made parallel as the user knows it, without what the harness puts beside it."""
        given = model.get_submodule("model") if hasattr(model, "own") else model
        before = _looks(given)
        mesh = mesh_of(setup, *(("dp_shard",) if self._has_data_axis else ()))
        made = self._functions["parallelize"](given, mesh)
        if made is None and setup.world_size > 1 and _looks(given) == before:
            then = "return the model that is to be trained, or change the given one in place"
            raise self._refusal("returned nothing and left the model as it was", "a module", then)
        if made is not None and not isinstance(made, nn.Module):
            raise self._refusal(f"returned {type(made).__name__}", "a module, or None", "return the model")
        made = given if made is None else made
        if given is model:
            return _Loop(self.name, made, made, given, setup, self._functions)
        model.model = made
        return _Loop(self.name, model, made, given, setup, self._functions)

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


class _Loop(TrainingLoop):
    """``model`` is called, ``made`` the parallel one in it, ``given`` what it was made of."""

    def __init__(
        self,
        name: str,
        model: nn.Module,
        made: nn.Module,
        given: nn.Module,
        setup: Setup,
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(model, setup, optimizer=setup.optimizer(made.parameters()))
        self._made, self._given = made, given if _has_all(given, made) else made
        self._name, self._functions, self._steps = name, functions, 0
        self._beside = self._of_what_is_beside()
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _of_what_is_beside(self) -> torch.optim.Optimizer | None:
        """The drawn optimizer of the harness's layer; None without one, or where the user's own trains their model."""
        if self.model is self._made or self.setup.step.optimizer.kind == "own":
            return None
        return self.setup.optimizer(self.model.get_submodule("instrument").parameters())

    def step(self, batch: Batch) -> None:
        if self._beside is not None:
            self._beside.zero_grad()
        if "step" not in self._functions or self.setup.step.max_grad_norm is not None:
            super().step(batch)
            return
        before = self._steps
        batches = [(micro.inputs, micro.targets) for micro in batch.micro_batches]
        loss = functools.partial(self._loss, batch)
        self._functions["step"](self.model, getattr(self.optimizer, "given", self.optimizer), batches, loss)
        if self._steps == before:
            then = "call it once, after the last backward"
            what = f"the step function of {self._name!r}"
            raise AdapterError(explain(what, got="no call of optimizer.step()", wanted="one a step", then=then))

    def _loss(self, batch: Batch, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Any = self.setup.loss
        if self.setup.step.reduction == "mean":
            return cast(Tensor, loss.with_reduction("mean")(outputs.to(targets.dtype), targets))
        return cast(Tensor, loss(outputs.to(targets.dtype), targets).sum() * batch.loss_scale)

    def _stepped(self) -> None:
        self._steps += 1
        if self._beside is not None:
            self._beside.step()

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        reduces, model = self.reduces(number, last), cast(Any, self._made)
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(reduces)
        elif hasattr(model, "no_sync") and not reduces:
            return cast(AbstractContextManager[object], model.no_sync())
        return nullcontext()

    def clip(self, limit: float) -> Tensor:
        if "clip" not in self._functions:
            return torch.nn.utils.clip_grad_norm_(self._made.parameters(), limit)
        norm = self._functions["clip"](self._made, limit)
        if not isinstance(norm, Tensor):
            what = f"the clip function of {self._name!r}"
            then = "return the total norm, as torch.nn.utils.clip_grad_norm_ does"
            raise AdapterError(explain(what, got=type(norm).__name__, wanted="torch.Tensor", then=then))
        return norm

    def parameters(self) -> dict[str, Tensor]:
        return dict(self._named())

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: value.grad for name, value in self._named()}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters by the names that they had before the model was made parallel."""
        if self.model is self._made:
            yield from ((_canonical(name), value) for name, value in self._given.named_parameters())
            return
        yield from ((f"model.{_canonical(name)}", value) for name, value in self._given.named_parameters())
        yield from self.model.get_submodule("instrument").named_parameters("instrument")


def _has_all(model: nn.Module, made: nn.Module) -> bool:
    """Whether what is trained are the parameters that ``model`` has now."""
    return {id(value) for value in model.parameters()} == {id(value) for value in made.parameters()}


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
