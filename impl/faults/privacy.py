"""Planted bugs of privacy: one record moves more than its clip norm, or what it must not move at all."""

from __future__ import annotations

from typing import Any

import torch

from ..clipping import clip_factors, norm_aggregation
from ..sharding import collectives
from ..sharding.collectives import Subject
from ._fault import Function, Hit, fault


@fault(
    "clipping.clip_factors:factors",
    "micro-batches averaged before they are clipped, https://github.com/tensorflow/privacy/issues/81",
    "privacy.sensitivity",
    cause="two samples .* share",
)
def pairs_share_a_norm(original: Function, hit: Hit) -> Function:
    """Two samples that follow each other are clipped by their mean squared norm, as one."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        pairs = squared_norms.clone()
        even = len(pairs) - len(pairs) % 2
        if even:
            hit()
            pairs[:even] = pairs[:even].reshape(-1, 2).mean(1, keepdim=True).expand(-1, 2).reshape(-1)
        return original(pairs, clip_norm)

    return planted


@fault(
    "clipping.clip_factors:factors",
    "a floor under clip factors, so that none vanishes in half precision; no public report known",
    "privacy.canary",
    cause="without clipping",
)
def factors_have_a_floor(original: Function, hit: Hit) -> Function:
    """Clip factors are 2^-14 at least, the smallest normal number of a float16."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        found = original(squared_norms, clip_norm)
        if bool((found < 2.0**-14).any()):
            hit()
        return found.clamp(min=2.0**-14)

    return planted


@fault(
    "clipping.clip_factors:factors",
    "a factor that is taken for zero and left out, https://github.com/google-deepmind/jax_privacy/pull/309",
    "privacy.canary",
    cause="without clipping",
)
def vanishing_factors_are_one(original: Function, hit: Hit) -> Function:
    """A clip factor that is zero in float16 is taken for no clipping."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        found = original(squared_norms, clip_norm)
        vanishing = found < 2.0**-16
        if bool(vanishing.any()):
            hit()
        return torch.where(vanishing, 1.0, found)

    return planted


@fault(
    "clipping.rules:PerLayer.factors",
    "per-layer clipping whose groups do not combine to C, https://github.com/google-deepmind/jax_privacy/issues/385",
    "privacy.sensitivity",
    cause="bound of all of them",
    subject="reference:bookkeeping",
)
def each_group_has_the_whole_bound(original: Function, hit: Hit) -> Function:
    """Each clipping group is clipped to sqrt(sum C_l^2), so that G groups together reach sqrt(G) times as far."""

    def planted(self: Any, squared_norms: torch.Tensor) -> torch.Tensor:
        hit()
        return torch.stack([clip_factors.factors(row, self.sensitivity) for row in squared_norms.unbind(0)])

    return planted


@fault(
    "clipping.clip_factors:factors",
    "a clip norm that follows the batch, https://github.com/meta-pytorch/opacus/pull/779",
    "privacy.independence",
    cause="median norm",
)
def clip_norm_follows_the_batch(original: Function, hit: Hit) -> Function:
    """The clip norm is lowered to the median norm of the micro-batch, without noise."""

    def planted(squared_norms: torch.Tensor, clip_norm: float) -> Any:
        if len(squared_norms) < 2:
            return original(squared_norms, clip_norm)
        hit()
        return original(squared_norms, min(clip_norm, float(squared_norms.median().sqrt())))

    return planted


@fault(
    "clipping.nonfinite_samples:found_in",
    "a norm that is infinite passes, https://github.com/deepspeedai/DeepSpeed/pull/7171",
    "clipping.nonfinite",
    cause="a weight of zero does not leave it out",
)
def nonfinite_norms_pass(original: Function, hit: Hit) -> Function:
    """Samples whose norm is NaN or infinite are taken for ordinary ones."""

    def planted(norms: torch.Tensor) -> torch.Tensor:
        hit()
        return torch.zeros_like(original(norms))

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.finish",
    "earlier parameters updated when a later gradient is found out, ooples/AiDotNet.Tensors#972",
    "clipping.nonfinite",
    cause="updated before the step is refused",
)
def updated_before_the_refusal(original: Function, hit: Hit) -> Function:
    """A sample without a finite norm is refused when the update is made already."""

    def planted(self: Any) -> None:
        try:
            original(self)
        except ArithmeticError:
            hit()
            with torch.no_grad():
                for shard in self.model.shards():
                    if shard.grad is not None:
                        shard.sub_(shard.grad)
            raise

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "noise of a mean where a sum is released, https://github.com/tensorflow/privacy/issues/153",
    "privacy.noise",
    cause="noise is divided by the number of samples that each rank has",
)
def noise_of_the_mean_drawn(original: Function, hit: Hit) -> Function:
    """Noise is divided by the number of samples that the rank has drawn, instead of N: who joins changes its scale."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        hit()
        original(self, step, max(len(self.found.indices), 1))

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "a counter of draws that goes on with the batches",
    "privacy.noise",
    cause="counted by their records",
)
def draws_counted_by_records(original: Function, hit: Hit) -> Function:
    """The counter of the noise goes on by the samples of a step: who joined it moves every later draw."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        before = getattr(self, "records", 0)
        if before and self.privacy.noise_multiplier:
            hit()
        original(self, step * 4096 + before, normaliser)
        own = torch.tensor([float(len(self.found.indices))])
        self.records = before + int(norm_aggregation.sum_over(own, collectives.axis()))

    return planted


_LOGGED = Subject("(norms, for a log)")


@fault(
    "trainer:Trainer.update",
    "a message as long as the largest local batch, https://github.com/meta-pytorch/opacus/issues/516",
    "privacy.collectives",
    cause="that of the largest local batch",
)
def log_as_long_as_the_batch(original: Function, hit: Hit) -> Function:
    """Norms are gathered for a log, padded to the largest local batch: how many samples there are is sent."""

    def planted(self: Any) -> None:
        original(self)
        if self.private is None:
            return
        everyone = collectives.axis()
        count = sum(len(norms) for norms in self.found.norms)
        counts = torch.empty(everyone.size, dtype=torch.int64)
        collectives.all_gather(_LOGGED, counts, torch.tensor([count]), everyone)
        hit()
        padded = torch.zeros(int(counts.max()), dtype=torch.float64)
        collectives.all_gather(_LOGGED, padded.new_empty(len(padded) * everyone.size), padded, everyone)

    return planted


@fault(
    "clipping.independence:refuse_dependent",
    "nobody asks whether samples mix: batch normalisation under per-sample clipping (Opacus' FAQ)",
    "clipping.across-samples",
    cause="samples of a micro-batch meet",
)
def samples_that_mix_are_taken(original: Function, hit: Hit) -> Function:
    """Whether a sample's loss depends on another's row is never asked."""

    def planted(*arguments: Any) -> None:
        hit()

    return planted


@fault(
    "clipping.independence:mixes_targets",
    "a loss divided by what of all samples counts, as cross-entropy's mean with ignore_index; no public report known",
    "clipping.across-samples",
    cause="samples of a micro-batch meet",
)
def targets_of_others_are_not_asked_about(original: Function, hit: Hit) -> Function:
    """Models are asked whether samples mix, and losses whether outputs do, but not whether targets do."""

    def planted(loss: Any, outputs: torch.Tensor, targets: torch.Tensor) -> bool:
        hit()
        return False

    return planted


@fault(
    "clipping.independence:_Watch.before",
    "a layer that is given another order of samples, whose norms are those of others; no public report known",
    "clipping.across-samples",
    cause="samples of a micro-batch meet",
)
def orders_of_samples_are_not_asked_about(original: Function, hit: Hit) -> Function:
    """Outputs show whether samples mix; what a layer is given is not looked at."""

    def planted(self: Any, where: str, counted: bool, module: Any, inputs: Any) -> None:
        original(self, where, counted, module, inputs)
        if self.at_layers and self.at_layers[-1][1]:
            hit()
            self.at_layers[-1] = (self.at_layers[-1][0], False)

    return planted
