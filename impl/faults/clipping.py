"""Planted bugs of clipping: factors, the two passes, and the global norm of plain training."""

from __future__ import annotations

from typing import Any

import torch

from ..clipping import clip_factors
from ..sharding import collectives
from ._fault import Function, Hit, fault

# -- clip factors -----------------------------------------------------------------------------------------------------


@fault(
    "trainer:Trainer.scale",
    "an expected batch size cut to a whole number, https://github.com/meta-pytorch/opacus/pull/280",
    "clipping.coefficients",
    cause="taken for a whole number",
)
def whole_normaliser(original: Function, hit: Hit) -> Function:
    """Samples are weighed by N rounded down, though the expected size of a Poisson draw is seldom a whole number."""

    def planted(self: Any, micro: Any) -> float:
        right, n = float(original(self, micro)), float(self.options.normaliser)
        if n.is_integer():
            return right
        hit()
        return right * n / max(1, int(n))

    return planted


@fault("clipping.clip_factors:factors", "eps outside the quotient", "clipping.*", cause="added to the quotient")
def eps_outside_the_quotient(original: Function, hit: Hit) -> Function:
    """factor = min(1, C / n + eps), which may exceed C / n."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        hit()
        return (torch.div(torch.full_like(squared_norms, clip_norm), squared_norms.sqrt()) + clip_factors.EPS).clamp(
            max=1.0
        )

    return planted


@fault("clipping.clip_factors:factors", "eps omitted", "clipping.*", cause="eps = 0 stands beside")
def eps_omitted(original: Function, hit: Hit) -> Function:
    """factor = min(1, C / n): a sample without gradient has factor C / 0."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        hit()
        return torch.div(torch.full_like(squared_norms, clip_norm), squared_norms.sqrt()).clamp(max=1.0)

    return planted


@fault(
    "clipping.clip_factors:factors",
    "factor formed from the squared norm",
    "clipping.factors",
    cause="squared norms stand in",
)
def factors_from_squared_norms(original: Function, hit: Hit) -> Function:
    """The square root is forgotten: factor = min(1, C / (n^2 + eps))."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        hit()
        return original(squared_norms.square(), clip_norm)

    return planted


@fault("clipping.clip_factors:factors", "clipping switched off", "rounding.clip-factors", cause="nothing is clipped")
def nothing_is_clipped(original: Function, hit: Hit) -> Function:
    """Every factor is 1, and reported so."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        hit()
        return torch.ones_like(squared_norms)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.clip_factors",
    "clipping switched off behind right reports",
    "rounding.clipped-sum",
    cause="nothing is clipped",
    subject="reference:bookkeeping",
)
def factors_reported_and_not_used(original: Function, hit: Hit) -> Function:
    """Bookkeeping: factors are formed and reported, and samples weigh 1."""

    def planted(self: Any, *arguments: Any) -> Any:
        hit()
        return torch.ones_like(original(self, *arguments))

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.clip_factors",
    "a scale applied twice, https://github.com/NVIDIA/apex/pull/1512",
    "*clip*",
    cause="square of their clip factor",
)
def factor_applied_twice(original: Function, hit: Hit) -> Function:
    """Samples are weighted by the square of their clip factor; the reported factors are right."""

    def planted(self: Any, *arguments: Any) -> Any:
        hit()
        return original(self, *arguments).square()

    return planted


@fault(
    "clipping.recorder:Recorder._refuse_unsound",
    "unclipped gradient of the first pass leaks, https://github.com/meta-pytorch/opacus/pull/734",
    "training.private-unclipped",
    cause="unclipped gradient leaked",
)
def first_backward_leaks(original: Function, hit: Hit) -> Function:
    """A backward before the first forms weight gradients too, unclipped, and nothing removes them before the second."""

    def planted(recorder: Any, records: Any, losses: torch.Tensor) -> None:
        hit()
        original(recorder, records, losses)
        if losses.requires_grad:
            torch.autograd.backward(losses, torch.ones_like(losses), retain_graph=True)

    return planted


@fault(
    "clipping.recorder:Recorder.squared_norm_terms",
    "norms from the wrong activations, https://github.com/meta-pytorch/opacus/pull/738",
    "deferred.equals-immediate",
    cause="micro-batch before",
)
def deferred_norms_are_stale(original: Function, hit: Hit) -> Function:
    """Deferred norms are computed from what the micro-batch before cached, wherever the sizes agree."""

    def planted(self: Any, losses: torch.Tensor, mode: Any) -> Any:
        terms = original(self, losses, mode)
        before = getattr(self, "_stale_terms", None)
        self._stale_terms = terms
        if mode.timing != "deferred" or before is None or before.complete.shape != terms.complete.shape:
            return terms
        hit()
        return before

    return planted


# -- the global norm --------------------------------------------------------------------------------------------------


@fault(
    "clipping.clip_factors:global_squared_norm",
    "own shard's norm taken for the whole, https://github.com/areal-project/AReaL/issues/312",
    "global-norm.returned",
    cause="shard alone",
)
def global_norm_of_own_shard(original: Function, hit: Hit) -> Function:
    """Each rank clips by the norm of its own gradient shard."""

    def planted(model: Any) -> Any:
        hit()
        squares = [clip_factors.own_gradient(piece).square().sum() for piece in model.pieces()]
        return torch.stack(squares).sum() if squares else torch.zeros(())

    return planted


@fault(
    "clipping.clip_factors:clip_global_norm",
    "only the reported norm is local, https://github.com/radixark/miles_diffusion/pull/35",
    "global-norm.returned",
    cause="shard alone",
)
def own_norm_reported(original: Function, hit: Hit) -> Function:
    """Clipping is right, but the norm returned is that of the rank's own shard."""

    def planted(model: Any, max_norm: float) -> Any:
        hit()
        squares = [clip_factors.own_gradient(piece).square().sum() for piece in model.pieces()]
        own = torch.stack(squares).sum().sqrt() if squares else torch.zeros(())
        original(model, max_norm)
        return own

    return planted


@fault(
    "clipping.clip_factors:clip_global_norm",
    "clipped tensor by tensor, https://github.com/fedbiomed/fedbiomed/issues/1443",
    "global-norm.update",
    cause="each unit's gradient is clipped",
)
def clipped_unit_by_unit(original: Function, hit: Hit) -> Function:
    """Each unit's gradient is clipped by its own norm; the norm returned is the global one."""

    def planted(model: Any, max_norm: float) -> Any:
        hit()
        norm = clip_factors.global_squared_norm(model).sqrt()
        for unit in model.units:
            if unit.trainable is not None and unit.trainable.shard.grad is not None:
                gradient = unit.trainable.shard.grad
                squared = gradient[: unit.trainable.real].square().sum()
                own = collectives.all_reduce_sum(clip_factors.GLOBAL_NORM, squared, model.axis).sqrt()
                gradient.mul_(clip_factors.global_factor(own, max_norm))
        return norm

    return planted


@fault(
    "clipping.clip_factors:global_squared_norm",
    "ranks that overflowed did not join the all-reduce, https://github.com/hpcaitech/ColossalAI/pull/1175",
    "global-norm.nonfinite",
    cause="leaves the others",
)
def norm_left_by_who_overflowed(original: Function, hit: Hit) -> Function:
    """A rank whose shard of the gradient is not finite takes its own norm, and no part in the all-reduce."""

    def planted(model: Any) -> Any:
        squares = [clip_factors.own_gradient(piece).square().sum() for piece in model.pieces()]
        if squares and not bool(torch.stack(squares).isfinite().all()):
            hit()
            return torch.stack(squares).sum()
        return original(model)

    return planted


@fault(
    "clipping.clip_factors:own_gradient",
    "NaN masked before the norm is taken, so that it tells nobody of it; no public report known",
    "global-norm.nonfinite",
    cause="left out of the norm",
)
def norm_of_what_is_finite(original: Function, hit: Hit) -> Function:
    """The global norm is that of the finite elements."""

    def planted(piece: Any) -> torch.Tensor:
        own: torch.Tensor = original(piece)
        if not bool(own.isfinite().all()):
            hit()
        return own.nan_to_num(0.0, 0.0, 0.0)

    return planted


@fault(
    "clipping.clip_factors:global_squared_norm", "padding read", "padding.unread-global-norm", cause="padding is read"
)
def padding_read_by_global_norm(original: Function, hit: Hit) -> Function:
    """The global norm sums over whole shards; it is right only while padding happens to be zero."""

    def planted(model: Any) -> Any:
        hit()
        squares = [torch.zeros(()) if s.grad is None else s.grad.square().sum() for s in model.shards()]
        total = torch.stack(squares).sum() if squares else torch.zeros(())
        return collectives.all_reduce_sum(clip_factors.GLOBAL_NORM, total, model.axis)

    return planted
