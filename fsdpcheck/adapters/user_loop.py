"""The trainer of a user's own parts: their step or an ordinary loop, their clipping, their checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapters.contract import Batch, Setup
from fsdpcheck.adapters.training_loop import TrainingLoop, synchronizing
from fsdpcheck.adapters.user_dtypes import Dtypes
from fsdpcheck.errors import AdapterError, explain

_WRAPPERS: Final = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names that wrappers of torch put in."""
_BESIDE: Final = ".beside"
"""What the name of the file ends with that has the harness's layer: it lies beside the user's folder."""


@dataclass(frozen=True)
class Built:
    """What parts have made. ``model`` is called, ``made`` the parallel one in it, ``given`` what it was made of.

    ``shapes``: of all parameters by name, before.
    """

    name: str
    functions: Mapping[str, Callable[..., Any]]
    model: nn.Module
    made: nn.Module
    given: nn.Module
    dtypes: Dtypes
    shapes: Mapping[str, torch.Size]


class Loop(TrainingLoop):
    """Steps by the user's function, or an ordinary loop."""

    def __init__(self, built: Built, setup: Setup) -> None:
        super().__init__(built.model, setup, optimizer=setup.optimizer(built.made.parameters()))
        self._built, self._made = built, built.made
        self._given = built.given if _has_all(built.given, built.made) else built.made
        self._name, self._functions, self._steps = built.name, built.functions, 0
        self._dtypes: Dtypes | None = built.dtypes
        self._beside = self._of_what_is_beside()
        _require_shapes(built.name, built.shapes, dict(self._named()))
        self.optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _of_what_is_beside(self) -> torch.optim.Optimizer | None:
        """The drawn optimizer of the harness's layer; None without one, or where the user's own trains their model."""
        if self.model is self._made or self.setup.step.optimizer.kind == "own":
            return None
        return self.setup.optimizer(self.model.get_submodule("instrument").parameters())

    def step(self, batch: Batch) -> None:
        if self._dtypes is None:
            self._step(batch)
            return
        with self._dtypes.watched(self._made):
            self._step(batch)
        self._dtypes = None  # one step has told

    def _step(self, batch: Batch) -> None:
        if self._beside is not None:
            self._beside.zero_grad()
        before = self._steps
        self._take(batch)
        if self._steps == before:
            then = "call it once, after the last backward"
            what = f"the step function of {self._name!r}"
            raise AdapterError(explain(what, got="no call of optimizer.step()", wanted="one a step", then=then))

    def _take(self, batch: Batch) -> None:
        """One step, by whichever function there is."""
        if "step" not in self._functions or self.setup.step.max_grad_norm is not None:
            TrainingLoop.step(self, batch)
            return
        batches = [(micro.inputs, micro.targets) for micro in batch.micro_batches]
        loss = functools.partial(self._loss, batch)
        self._functions["step"](self._made, self._users_optimizer, batches, loss)

    def _loss(self, batch: Batch, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of what the user's own model gives; the harness's layer, if one stands beside it, is read here."""
        loss: Any = self.setup.loss
        if self.model is not self._made:
            outputs = cast(Any, self.model).beside(outputs, len(targets))
        if self.setup.step.reduction == "mean":
            return cast(Tensor, loss.with_reduction("mean")(outputs.to(targets.dtype), targets))
        return cast(Tensor, loss(outputs.to(targets.dtype), targets).sum() * batch.loss_scale)

    def _stepped(self) -> None:
        self._steps += 1
        if self._beside is not None:
            self._beside.step()

    def reducing(self, number: int, last: int) -> AbstractContextManager[object]:
        return synchronizing(self._made, self.reduces(number, last))

    def clip(self, limit: float) -> Tensor:
        if "clip" not in self._functions:
            return torch.nn.utils.clip_grad_norm_(self._made.parameters(), limit)
        norm = self._functions["clip"](self._made, limit)
        if not isinstance(norm, Tensor):
            what = f"the clip function of {self._name!r}"
            then = "return the total norm, as torch.nn.utils.clip_grad_norm_ does"
            raise AdapterError(explain(what, got=type(norm).__name__, wanted="torch.Tensor", then=then))
        return norm

    @property
    def _users_optimizer(self) -> Any:
        """What the user's functions know: several optimizers as their own function gave them."""
        return getattr(self.optimizer, "given", self.optimizer)

    def save(self, folder: str) -> None:
        """By the user's function. A job that stops ends on all ranks, so whoever loads waits for all of them."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._functions["save"](self._made, self._users_optimizer, folder)
        if self._beside is not None and self.setup.rank == 0:
            layer = self.model.get_submodule("instrument")
            torch.save((layer.state_dict(), self._beside.state_dict()), folder + _BESIDE)
        dist.barrier()

    def load(self, folder: str) -> None:
        """By the user's function; what the harness has put beside their model comes back by itself."""
        self._functions["load"](self._made, self._users_optimizer, folder)
        kept = fill_beside(self.model, folder)
        if self._beside is not None:
            self._beside.load_state_dict(kept)

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


def _require_shapes(name: str, shapes: Mapping[str, torch.Size], shown: Mapping[str, Tensor]) -> None:
    """Raise AdapterError for parameters that cannot be told any more: of other names, or cut without DTensor."""
    for one, wanted in shapes.items():
        got = shown[one].shape if one in shown else None
        if got != wanted:
            what = f"what parallelize function {name!r} leaves of parameter {one}"
            then = "fully_shard and DTensor keep both; for FullyShardedDataParallel there is --adapter fsdp1, and an"
            then += " adapter of your own can show a Part of each tensor (docs/adapters.md)"
            said = "no parameter of this name" if got is None else f"one of shape {list(got)}"
            raise AdapterError(explain(what, got=said, wanted=f"its name, and shape {list(wanted)}", then=then))


def _has_all(model: nn.Module, made: nn.Module) -> bool:
    """Whether what is trained are the parameters that ``model`` has now."""
    return {id(value) for value in model.parameters()} == {id(value) for value in made.parameters()}


def _canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def fill_beside(model: nn.Module, folder: str) -> Any:
    """Fill what the harness has put beside a user's model from what it saved beside ``folder``, if it did.

    Returns the state of that part's own optimizer.
    """
    if not Path(folder + _BESIDE).exists():
        return None
    layer, optimizer = torch.load(folder + _BESIDE)
    model.get_submodule("instrument").load_state_dict(layer)
    return optimizer
