"""A user's own private step, which clips each sample and may add noise: what is said of it, and what it is called with.

``private(model, optimizer, batches, losses, max_grad_norm, normaliser)`` is one optimizer step. ``batches`` are this
rank's micro-batches as (inputs, targets), ``losses(outputs, targets)`` the losses [n] of n samples. It clips the
gradient of each sample to ``max_grad_norm``, over all parameters of ``model`` that are trained, adds up over all ranks
and divides by ``normaliser``. A parameter ``noise_multiplier`` is given the standard deviation of the noise in units of
``max_grad_norm``, and one called ``seed`` what is equal on all ranks. It may return a dict of "norms" and "factors",
[local samples] each, in the order of its samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, cast

from torch import Tensor

from fsdpcheck.adapters.contract import Batch, FactorRule, Observable, Promise, Setup
from fsdpcheck.adapters.user_loop import Built, Loop
from fsdpcheck.case import Trait
from fsdpcheck.errors import AdapterError, explain

SHOWN: Final = ("norms", "factors")
PRIVATE_REASONS: Final = {
    "plain": "clips each sample: --step names a step of plain training, --private one that clips",
    "global-norm": "clips each sample, and no global gradient norm",
    "exact-factors": "said to form norms of norms, whose rounding is in its clip factors (--factor)",
    "noise": "takes no noise_multiplier",
    "noise-of-seed": "what of its noise follows from the seed alone is not said",
    "across-samples": "whether models that compute across samples are refused is not said",
    "nonfinite": "what becomes of samples whose norm is NaN or infinite is not said",
    "second-backward": "how clipped gradients come about is not said",
    "bookkeeping": "how clipped gradients come about is not said",
}
_REQUIRED: Final = ("max_grad_norm", "normaliser")
_OFFERED: Final = (*_REQUIRED, "noise_multiplier", "seed")
_POSITIONAL: Final = ("model", "optimizer", "batches", "losses")
_OF_LAYERS: Final[frozenset[Trait]] = frozenset(
    {"attention-private", "conv-private", "group-norm-private", "rms-norm-private", "bags-private", "tied-private",
     "reused-private", "several-heads-private", "same-padding-private", "mean-bags-private",
     "padding-mode-private", "masked-private"}
)  # fmt: skip
NOT_PRIVATE: Final[frozenset[Trait]] = frozenset(
    {"replicated", "mean", "no-sync", "fractional-normaliser", "evaluation", "attention", "conv", "group-norm",
     "rms-norm", "bags", "tied", "reused", "one-row"}
)  # fmt: skip
"""Traits of plain training, and batches that several ranks have: no argument tells of them."""


def accepted(plain: frozenset[Trait]) -> frozenset[Trait]:
    """Traits of private cases, for functions that accept ``plain`` ones in plain training."""
    return plain - NOT_PRIVATE | _OF_LAYERS


def promised(name: str, function: Callable[..., Any], rule: FactorRule) -> set[Promise]:
    """What follows from the function's arguments and from its rule. Raises AdapterError for ones that do not fit."""
    found: set[Promise] = {"private"} if rule.nested else {"private", "exact-factors"}
    return found | ({"noise"} if "noise_multiplier" in _named(name, function) else set())


def shown(name: str, words: Mapping[str, str]) -> frozenset[Observable]:
    """What the function returns, as it is said. Raises AdapterError for anything else."""
    said = frozenset(words["shows"].split("+")) if "shows" in words else frozenset[str]()
    if unknown := sorted(said - {*SHOWN}):
        raise _wrong(f"what {name!r} is said to return", unknown[0], ", ".join(SHOWN), "write --shows norms,factors")
    return cast(frozenset[Observable], said | {"params", "grads"})


def rule_of(name: str, words: Mapping[str, str]) -> FactorRule:
    """The expression of clip factors, which nobody can guess. Raises AdapterError where it is not said."""
    expression, eps, norm = (*words.get("factor", "").split("+"), "", "", "")[:3]
    try:
        added = float(eps)
    except ValueError:
        added = -1.0
    if expression not in ("divide", "reciprocal") or added < 0 or norm not in ("flat", "nested"):
        got = words.get("factor", "nothing").replace("+", ",")
        wanted = "EXPRESSION,EPS,NORM, as reciprocal,1e-6,flat"
        then = (
            "say how factors come of norms: divide is C / (n + EPS), as torch.div(tensor, tensor), reciprocal what"
            " C / tensor is in torch; flat is the root of one sum of squares, nested a norm of parameters' norms"
        )
        raise _wrong(f"--factor of the private step of {name!r}", got, wanted, then)
    return FactorRule(eps=added, expression=cast(Literal["divide", "reciprocal"], expression), nested=norm == "nested")


def _named(name: str, function: Callable[..., Any]) -> list[str]:
    """What of that which is offered by name the function takes. Raises AdapterError for arguments that nobody has."""
    known = list(inspect.signature(function).parameters.values())
    rest = [one for one in known if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)][len(_POSITIONAL) :]
    given = [*_OFFERED] if any(one.kind == one.VAR_KEYWORD for one in known) else [one.name for one in rest]
    taken = [one for one in given if one in _OFFERED]
    missing = [one for one in _REQUIRED if one not in taken]
    unknown = [one.name for one in rest if one.name not in _OFFERED and one.default is one.empty]
    if missing or unknown or len([one for one in known if one not in rest]) < len(_POSITIONAL):
        got = f"({', '.join(one.name for one in known)})"
        then = "name arguments so; noise_multiplier and seed may be left out, and others have defaults"
        raise _wrong(f"the private step of {name!r}", got, f"({', '.join((*_POSITIONAL, *_OFFERED))})", then)
    return taken


class PrivateLoop(Loop):
    """Steps by the user's private function."""

    def __init__(self, built: Built, setup: Setup, shows: frozenset[Observable]) -> None:
        super().__init__(built, setup)
        self._shows = sorted(shows & {*SHOWN})
        self._shown: dict[str, Tensor] = {}
        offered = {
            "max_grad_norm": setup.clip_norm,
            "normaliser": setup.step.normaliser,
            "noise_multiplier": setup.step.noise_multiplier,
            "seed": setup.seed,
        }
        taken = _named(built.name, built.functions["private"])
        self._options = {name: value for name, value in offered.items() if name in taken}

    def _take(self, batch: Batch) -> None:
        batches = [(micro.inputs, micro.targets) for micro in batch.micro_batches]
        function = self._built.functions["private"]
        given = function(self.model, self._users_optimizer, batches, self._losses, **self._options)
        found = given if isinstance(given, Mapping) else {}
        for name in self._shows:
            value = found.get(name)
            if not isinstance(value, Tensor) or tuple(value.shape) != (batch.size,):
                what = f"what the private step of {self._built.name!r} returns as {name}"
                got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                then = f'return {{"{name}": tensor}}, or leave {name} out of --shows'
                raise _wrong(what, got, f"a tensor of shape [{batch.size}], this rank's samples", then)
            self._shown[name] = value.detach().clone()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses: Tensor = self.setup.loss(outputs.to(targets.dtype), targets)
        return losses

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: value.grad for name, value in self._named() if value.requires_grad}

    def norms(self) -> Tensor:
        return self._shown["norms"]

    def factors(self) -> Tensor:
        return self._shown["factors"]


def _wrong(what: str, got: object, wanted: object, then: str) -> AdapterError:
    return AdapterError(explain(what, got=got, wanted=wanted, then=then))
