"""Planted bugs of parameters that are left out of sharding (``ignored_params``) in a private step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..clipping import tied_parameters
from ..clipping.modes import Mode
from ..clipping.records import Layer, Use
from ..sharding.collectives import ALONE
from ._fault import Function, Hit, fault

_ignored_fault = partial(fault, subject="reference_fsdp2")


@_ignored_fault(
    "sharding.ignored_parameters:IgnoredParameters.average",
    "nobody averages the gradients of ignored parameters, https://github.com/pytorch/pytorch/issues/98281",
    "features.ignored",
    cause="right without ignored",
)
def ignored_gradients_stay_local(original: Function, hit: Hit) -> Function:
    """Gradients of parameters that are not sharded are what each rank has of its own samples."""

    def planted(self: Any, added: Mapping[str, Tensor]) -> None:
        hit()
        axes = self._axis, self._replicas
        self._axis = self._replicas = ALONE
        try:
            original(self, added)
        finally:
            self._axis, self._replicas = axes

    return planted


@_ignored_fault(
    "clipping.recorder:term",
    "norms of what is sharded alone, https://github.com/pytorch/pytorch/issues/98281",
    "privacy.ignored",
    cause="left out of the norm",
)
def ignored_parameters_left_out_of_norms(original: Function, hit: Hit) -> Function:
    """Per-sample norms are over the sharded parameters alone."""

    def planted(together: Sequence[Use], mode: Mode, group_of: tied_parameters.GroupOf) -> Any:
        if not any(_ignored(use.record.layer) for use in together):
            return original(together, mode, group_of)
        hit()
        terms = tied_parameters.squared_terms([_of_sharded(use) for use in together], group_of)
        return terms or {(0, "complete"): together[0].raw.new_zeros(len(together[0].raw))}

    return planted


def _ignored(layer: Layer) -> list[str]:
    """Attributes of the layer whose parameters are not sharded."""
    left_out = getattr(layer.model, "_left_out", None)
    return [] if left_out is None else [at for at, name in layer.names.items() if name in left_out.names]


def _of_sharded(use: Use) -> Use:
    names = {at: name for at, name in use.record.layer.names.items() if at not in _ignored(use.record.layer)}
    return replace(use, record=replace(use.record, layer=replace(use.record.layer, names=names)))


@_ignored_fault(
    "sharding.ignored_parameters:IgnoredParameters.pieces",
    "noise on what the wrapper holds alone, https://github.com/pytorch/pytorch/issues/98281",
    "noise.ignored",
    cause="no noise is added to them",
)
def ignored_parameters_have_no_noise(original: Function, hit: Hit) -> Function:
    """Noise is added to sharded gradients alone."""

    def planted(self: Any) -> Any:
        hit()
        return []

    return planted


@_ignored_fault(
    "sharding.ignored_parameters:IgnoredParameters.pieces",
    "each rank draws for itself, https://github.com/meta-pytorch/opacus/pull/761",
    "noise.ignored",
    cause="noise of its own",
)
def ignored_parameters_have_noise_by_rank(original: Function, hit: Hit) -> Function:
    """Each rank draws noise of its own for parameters that every rank holds."""

    def planted(self: Any) -> Any:
        hit()
        return [replace(piece, name=f"{piece.name} of {self._axis.rank}") for piece in original(self)]

    return planted


@_ignored_fault(
    "sharding.ignored_parameters:IgnoredParameters.pieces",
    "a global norm that adds up over ranks what each of them holds whole, https://github.com/pytorch/pytorch/issues/98281",
    "global-norm.ignored",
    cause=r"counts \d+ times in it, as if every rank's whole one were a shard",
)
def ignored_parameters_count_on_every_rank(original: Function, hit: Hit) -> Function:
    """The whole gradient of a parameter that is not sharded counts in the global norm of every rank, so W times."""

    def planted(self: Any) -> Any:
        hit()
        return [replace(piece, copied=False) for piece in original(self)]

    return planted


@_ignored_fault(
    "sharding.ignored_parameters:IgnoredParameters.share",
    "a norm that adds up over ranks what each of them holds whole, https://github.com/pytorch/pytorch/issues/88955",
    "norms.ignored",
    cause=r"complete on every rank, is counted [WS] = \d+ times",
)
def ignored_parameters_are_partial_terms_everywhere(original: Function, hit: Hit) -> Function:
    """Where norms are summed over the ranks each rank adds all of a parameter that it has whole: it counts W times."""

    def planted(self: Any, name: str) -> slice:
        hit()
        return slice(0, None)

    return planted
