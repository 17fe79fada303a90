"""Planted bugs of mixed precision: what must stay in float32 while the model computes in bfloat16, or TF32, does not.

Each does its harm only there. Values that a rank computes fit the low precision, or no law could compare bits; what is
wrong with the bits of sums over ranks, squares and updates is what can be seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..clipping.records import HALF
from ._fault import Function, Hit, fault


@fault(
    "sharding.collectives:reduce_scatter_average",
    "a reduction in the dtype that the model computes in, https://github.com/pytorch/pytorch/issues/186998",
    "precision.gradients",
    cause="gradients of .* rounded to 8 bits, the precision of bfloat16, when they are reduced",
)
def reduced_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, gradients are added over the ranks in it too."""

    def planted(unit: Any, full: Tensor, axis: Any) -> Any:
        half = _half(unit.trainable.parameters)
        if half is None or axis.size == 1:
            return original(unit, full, axis)
        hit()
        return original(unit, full.to(half), axis).to(full.dtype)

    return planted


@fault(
    "sharding.flat_buffer:FlatBuffer.__init__",
    "parameters that are cast before they are sharded, https://github.com/huggingface/accelerate/pull/3985",
    "precision.initial",
    cause="parameters were rounded to 8 bits, the precision of bfloat16, before they were sharded",
)
def shards_of_copies_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, the shards are made of the parameters that it computes with."""

    def planted(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        half = _half(self.parameters)
        if half is not None:
            hit()
            self.shard.data.copy_(self.shard.data.to(half))

    return planted


@fault(
    "trainer:Trainer.update",
    "a model trained in bfloat16 without float32 copies: updates below its rounding are lost",
    "precision.*r*a*",
    cause="parameters of .* rounded to 8 bits, the precision of bfloat16",
)
def parameters_kept_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, what is trained is rounded to it after each update."""

    def planted(self: Any) -> None:
        original(self)
        half = _half(self.model.module.parameters())
        if half is not None:
            hit()
            for shard in self.model.shards():
                shard.data.copy_(shard.data.to(half))

    return planted


@fault(
    "clipping.records:lifted",
    "squares of half-precision gradients summed in half precision, or a Gram product that returns it",
    "precision.norms",
    cause="squared norms are rounded to 8 bits, the precision of bfloat16",
)
def norms_summed_in_half_precision(original: Function, hit: Hit) -> Function:
    """Norm rules are given activations and backprops in half precision, and square and add up in it."""

    def planted(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype in HALF:
            hit()
            return value
        return original(value)

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.lift_gradients",
    "gradients of several backwards added up in the dtype of the copies that the model computes with, as"
    " FullyShardedDataParallel does under no_sync (torch 2.13)",
    "precision.gradients",
    cause="gradients of .* rounded to 8 bits, the precision of bfloat16, as micro-batches are added up",
)
def micro_batches_added_up_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, micro-batches that are not reduced are added up in it too."""

    def planted(self: Any) -> None:
        if self.trainable is None or _half(self.trainable.parameters) is None:
            original(self)
        elif any(parameter.grad is not None for parameter in self.trainable.parameters):
            hit()

    return planted


@fault(
    "clipping.private_backward:PrivateBackward._factors",
    "a path of its own for mixed precision, in which clipping was forgotten",
    "precision.c*",
    cause="not clipped at all|nothing is clipped",
)
def nothing_clipped_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, every sample has weight 1, whatever is reported."""

    def planted(self: Any, *arguments: Any) -> Tensor:
        factors: Tensor = original(self, *arguments)
        if _half(_computing(self.model)) is None:
            return factors
        hit()
        return torch.ones_like(factors)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward._report",
    "clip factors cast to the dtype of the losses they multiply",
    "precision.factors",
    cause="clip factors are rounded to 8 bits, the precision of bfloat16",
)
def factors_rounded_to_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, clip factors are rounded to it, and reported so."""

    def planted(self: Any, squared: Tensor, factors: Tensor, indices: Any) -> None:
        half = _half(_computing(self.model))
        if half is not None:
            hit()
            factors.copy_(factors.to(half))
        original(self, squared, factors, indices)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward._contract",
    "weights cast to the dtype of the losses before gradients are contracted",
    "precision.bookkeeping",
    cause="clip factors are rounded to 8 bits, the precision of bfloat16",
    subject="reference:bookkeeping",
)
def weights_rounded_to_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, bookkeeping rounds the weights of samples to it, unreported."""

    def planted(self: Any, kept: Any, weights: Tensor, *arguments: Any, **more: Any) -> None:
        half = _half(_computing(self.model))
        if half is not None:
            hit()
            weights = weights.to(half).to(weights.dtype)
        original(self, kept, weights, *arguments, **more)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "noise drawn in the dtype that the model computes in",
    "precision.noise",
    cause="noise: rounded to 8 bits, the precision of bfloat16",
)
def noise_rounded_to_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, noise is rounded to it before it is added."""

    def planted(self: Any, *arguments: Any) -> None:
        half = _half(_computing(self.model))
        if half is None or self.privacy.noise_multiplier == 0:
            original(self, *arguments)
            return
        hit()
        clean = [None if shard.grad is None else shard.grad.clone() for shard in self.model.shards()]
        original(self, *arguments)
        for shard, before in zip(self.model.shards(), clean, strict=True):
            if before is not None:
                shard.grad.copy_(before + (shard.grad - before).to(half))

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "noise added to gradients of one dtype only",
    "precision.noise",
    cause="no noise is added at all",
)
def no_noise_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, no noise is added."""

    def planted(self: Any, *arguments: Any) -> None:
        if _half(_computing(self.model)) is None or self.privacy.noise_multiplier == 0:
            original(self, *arguments)
        else:
            hit()

    return planted


@fault(
    "clipping.clip_factors:clip_global_norm",
    "a loop for mixed precision that takes the norm for its log and clips nothing",
    "precision.global-norm",
    cause="the gradient is not clipped at all",
)
def global_norm_ignored_in_half_precision(original: Function, hit: Hit) -> Function:
    """Where the model computes in half precision, the global norm is returned, and the gradient stays as it is."""

    def planted(model: Any, max_norm: float) -> Tensor:
        if _half(_computing(model)) is None:
            clipped: Tensor = original(model, max_norm)
            return clipped
        hit()
        norm: Tensor = original(model, float("inf"))
        return norm

    return planted


@fault(
    "sharding.flat_unit:FlatUnit.accumulate",
    "gradients rounded to TF32 on their way, as a product with a matrix of ones does",
    "precision.tf32-training",
    cause="gradients of .* rounded to 11 bits, the precision of .*TF32, when they are reduced",
)
def gradients_rounded_to_tf32(original: Function, hit: Hit) -> Function:
    """Where products may be taken in TF32, reduced gradients are rounded to its 11 bits."""

    def planted(self: Any, gradient: Tensor) -> None:
        original(self, _tf32(gradient, hit))

    return planted


@fault(
    "clipping.norm_aggregation:squared_norms",
    "a sum of squares as a product of matrices, in TF32",
    "precision.tf32-norms",
    cause="squared norms are rounded to 11 bits, the precision of .*TF32",
)
def norms_rounded_to_tf32(original: Function, hit: Hit) -> Function:
    """Where products may be taken in TF32, squared norms are rounded to its 11 bits."""

    def planted(*arguments: Any) -> Any:
        return _tf32(original(*arguments), hit)

    return planted


def _half(parameters: Any) -> torch.dtype | None:
    """The half-precision dtype of the parameters that the model computes with, or None."""
    return next((parameter.dtype for parameter in parameters if parameter.dtype in HALF), None)


def _computing(model: Any) -> Any:
    """The parameters that a sharded model computes with."""
    return model.module.parameters()


def _tf32(values: Tensor, hit: Hit) -> Tensor:
    """``values`` rounded to 11 bits if products may be."""
    if not torch.backends.cuda.matmul.allow_tf32:
        return values
    hit()
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)
