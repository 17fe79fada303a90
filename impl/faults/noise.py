"""Planted bugs of noise: drawn by place in a shard, by replica, again, too often, off in scale or shape, on padding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ._fault import Function, Hit, fault


@fault(
    "clipping.private_backward:Privacy.deviation",
    "an expected batch size that is a whole number for the noise alone, https://github.com/meta-pytorch/opacus/pull/280",
    "noise.scale",
    cause="taken for a whole number",
)
def noise_of_a_whole_normaliser(original: Function, hit: Hit) -> Function:
    """Noise is divided by N rounded up, the gradient by N."""

    def planted(self: Any, normaliser: float) -> float:
        if not float(normaliser).is_integer():
            hit()
        return float(original(self, math.ceil(normaliser)))

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "noise divided by the number of ranks that share a batch, https://github.com/meta-pytorch/opacus/pull/761",
    "noise.scale",
    cause="1/W: noise is divided by the number of ranks",
)
def noise_divided_among_ranks_of_one_batch(original: Function, hit: Hit) -> Function:
    """On a replicated batch noise is divided by the number of ranks, as if each of them added its own."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        ranks = self.model.axis.size * self.model.replicas.size
        if self.layout == "replicated" and ranks > 1 and self.privacy.noise_multiplier:
            hit()
            normaliser *= ranks
        original(self, step, normaliser)

    return planted


@fault(
    "noise.gaussian:Noise.add_",
    "each worker seeds alike and draws for its shard, https://github.com/meta-pytorch/opacus/pull/166",
    "noise.world",
    cause="for its shard from the beginning",
)
def noise_by_place_in_the_shard(original: Function, hit: Hit) -> Function:
    """Every rank draws from the beginning of its own piece: shards of one parameter have equal noise."""

    def planted(self: Any, pieces: Any, step: int, deviation: float) -> None:
        own = [replace(piece, start=0) for piece in pieces]
        hit()
        original(self, own, step, deviation)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "replicas draw for themselves, https://github.com/meta-pytorch/opacus/pull/761",
    "noise.once",
    cause="replicas draw noise",
)
def replicas_draw_for_themselves(original: Function, hit: Hit) -> Function:
    """Each replica has noise of its own, as from the generator of its rank: replicas drift apart."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        if self.model.replicas.rank and self.privacy.noise_multiplier:
            hit()
            step += 1000 * self.model.replicas.rank
        original(self, step, normaliser)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "the key of a step used again, https://github.com/jax-ml/jax/pull/3646",
    "noise.once",
    cause="draw of step 0",
)
def every_step_has_the_noise_of_the_first(original: Function, hit: Hit) -> Function:
    """The counter of steps does not reach the noise: all steps have the same."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        if self.privacy.noise_multiplier:
            hit()
        original(self, 0, normaliser)

    return planted


@fault(
    "noise.gaussian:chacha_words",
    "the key of a step used again, https://github.com/jax-ml/jax/pull/3646",
    "noise.once",
    cause="draw of step 0",
)
def secure_noise_of_the_first_step(original: Function, hit: Hit) -> Function:
    """The step is no nonce of the secure generator: whoever draws from it has the same noise in all steps."""

    def planted(key: list[int], step: int, first: int, last: int, device: torch.device) -> Any:
        hit()
        return original(key, 0, first, last, device)

    return planted


@fault(
    "noise.gaussian:Noise.add_",
    "the key of a draw used again, https://github.com/jax-ml/jax/pull/3646",
    "noise.once",
    cause="which parameter it is for",
)
def every_parameter_has_the_same_noise(original: Function, hit: Hit) -> Function:
    """The name of a parameter does not reach the noise: all parameters have that of one."""

    def planted(self: Any, pieces: Any, step: int, deviation: float) -> None:
        hit()
        original(self, [replace(piece, name="any") for piece in pieces], step, deviation)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "noise added in every micro-batch, https://github.com/google-deepmind/optax/issues/527",
    "noise.micro-batches",
    cause="drawn in every micro-batch",
)
def noise_in_every_micro_batch(original: Function, hit: Hit) -> Function:
    """Noise is added as often as there are micro-batches, each time another."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        original(self, step, normaliser)
        for again in range(1, len(self.found.norms)):
            if self.privacy.noise_multiplier:
                hit()
            original(self, step + 1000 * again, normaliser)

    return planted


@fault(
    "clipping.private_backward:PrivateBackward.add_noise",
    "noise on the whole flat buffer, https://github.com/pytorch/pytorch/pull/113106",
    "noise.padding",
    cause="padding becomes non-zero",
)
def noise_on_padding(original: Function, hit: Hit) -> Function:
    """The padding of every trained shard has noise too."""

    def planted(self: Any, step: int, normaliser: float) -> None:
        original(self, step, normaliser)
        for unit in self.model.units if self.privacy.noise_multiplier else ():
            if unit.trainable is not None and unit.trainable.real < unit.trainable.shard_numel:
                hit()
                unit.trainable.shard.grad[unit.trainable.padding] += self.privacy.deviation(normaliser)

    return planted


@fault(
    "clipping.private_backward:Privacy.deviation",
    "a scale that is a little off, https://github.com/google-deepmind/jax_privacy/issues/383",
    "noise.scale",
    cause=r"0\.99\d* times|0\.98[5-9]\d* times",
)
def noise_one_percent_too_small(original: Function, hit: Hit) -> Function:
    """The noise has 99 % of the standard deviation that was asked for."""

    def planted(self: Any, normaliser: float) -> Any:
        hit()
        return original(self, normaliser) * 0.99

    return planted


@fault(
    "noise.gaussian:Noise.add_",
    "noise left to the weights, https://github.com/google-deepmind/jax_privacy/issues/383",
    "noise.scale",
    cause=r"the noise of .*bias.* is 0\.(1|09)\d* times as large",
)
def biases_have_a_tenth_of_the_noise(original: Function, hit: Hit) -> Function:
    """Biases get noise of a tenth of the standard deviation; weights get what was asked for."""

    def planted(self: Any, pieces: Any, step: int, deviation: float) -> None:
        pieces = list(pieces)
        biases = [piece for piece in pieces if piece.name.endswith("bias")]
        original(self, [piece for piece in pieces if not piece.name.endswith("bias")], step, deviation)
        if biases:
            hit()
            original(self, biases, step, deviation / 10)

    return planted


@fault(
    "noise.gaussian:Noise.add_",
    "noise that the first step alone has whole, https://github.com/meta-pytorch/opacus/pull/530",
    "noise.scale",
    cause=r"the noise of step 1 is 0\.(1|09)\d* times as large",
)
def later_steps_have_a_tenth_of_the_noise(original: Function, hit: Hit) -> Function:
    """From the second step on noise has a tenth of the standard deviation."""

    def planted(self: Any, pieces: Any, step: int, deviation: float) -> None:
        if step:
            hit()
        original(self, pieces, step, deviation / 10 if step else deviation)

    return planted


@fault(
    "noise.gaussian:Noise.add_",
    "a key used in two steps, https://github.com/jax-ml/jax/pull/3646",
    "noise.once",
    cause="draw of step 0, .*, negated",
)
def noise_is_taken_back_in_the_next_step(original: Function, hit: Hit) -> Function:
    """Every second step has the noise of the one before, negated: two steps together have none."""

    def planted(self: Any, pieces: Any, step: int, deviation: float) -> None:
        if step % 2 == 0:
            original(self, pieces, step, deviation)
            return
        hit()
        for piece in pieces:
            piece.gradient.neg_()
            original(self, [piece], step - 1, deviation)
            piece.gradient.neg_()

    return planted


@fault(
    "noise.gaussian:Noise.normal",
    "one draw shared by all steps, https://github.com/jax-ml/jax/pull/3646",
    "noise.independent",
    cause="the same in every step",
)
def steps_share_most_of_their_noise(original: Function, hit: Hit) -> Function:
    """Of the variance of every draw 99 % is that of one which all steps have; the scale is right, no draw is equal."""

    def planted(self: Any, name: str, step: int, start: int, stop: int, deviation: float, *kind: Any) -> Any:
        hit()
        own = original(self, name, step + 1, start, stop, deviation / 10, *kind)
        return own.add_(original(self, name, 0, start, stop, deviation * 0.99**0.5, *kind))

    return planted


@fault(
    "noise.gaussian:Noise.normal",
    "noise that tells of itself, https://github.com/meta-pytorch/opacus/pull/761",
    "noise.independent",
    cause="the same in neighbouring elements",
)
def neighbours_share_half_of_their_noise(original: Function, hit: Hit) -> Function:
    """Elements 2k and 2k + 1 have half of their variance in common; the scale is right, no draw is equal."""

    def planted(self: Any, name: str, step: int, start: int, stop: int, deviation: float, *kind: Any) -> Any:
        hit()
        own = original(self, name, step, start, stop, deviation * 0.5**0.5, *kind)
        both = original(self, name + " in pairs", step, start // 2, stop // 2 + 1, deviation * 0.5**0.5, *kind)
        return own.add_(both.repeat_interleave(2)[start % 2 :][: stop - start])

    return planted


@fault(
    "noise.gaussian:philox_words",
    "a counter of 16 bits: draws of a large parameter come again, https://github.com/meta-pytorch/opacus/issues/161",
    "noise.independent",
    cause=r"elements i \+ 65536 is that of",
)
def noise_comes_again_after_65536_elements(original: Function, hit: Hit) -> Function:
    """Elements of a parameter are counted in 16 bits: those beyond have the noise of those before."""

    def planted(key: Any, step: int, first: int, last: int, device: Any) -> Any:
        if last <= 1 << 16:
            return original(key, step, first, last, device)
        hit()
        found = original(key, step, 0, 1 << 16, device)
        places = torch.arange(first, last, device=device) & 0xFFFF
        return [words[places] for words in found]

    return planted


@fault(
    "noise.gaussian:Noise.normal",
    "a sampler of another distribution, https://github.com/meta-pytorch/opacus/issues/616",
    "noise.scale",
    cause="draws are uniform, not Gaussian",
)
def noise_is_uniform(original: Function, hit: Hit) -> Function:
    """Noise of the right standard deviation is uniform on an interval."""

    def planted(
        self: Any, name: str, step: int, start: int, stop: int, deviation: float, dtype: torch.dtype, device: Any
    ) -> Any:
        hit()
        drawn = self.uniform(name, step, start, stop, device)
        return ((drawn - 0.5) * 12**0.5 * deviation).to(dtype)

    return planted


@fault(
    "clipping.rules:PerLayer.sensitivity",
    "noise for one group of several, https://arxiv.org/abs/1812.06210",
    "noise.scale",
    cause="the largest C_l",
    subject="reference:bookkeeping",
)
def sensitivity_is_the_largest_bound(original: property, hit: Hit) -> property:
    """With a clip norm for each group of parameters, the largest of them stands for the root of the sum of squares."""

    def planted(self: Any) -> Any:
        hit()
        return max(self.bounds.values())

    return property(planted)


@fault(
    "noise.gaussian:philox_words",
    "a counter that wraps around too soon, as of a key or a step cut to few bits",
    "noise.once",
    cause="draw of step 0",
)
def noise_repeats_every_other_step(original: Function, hit: Hit) -> Function:
    """The noise of step 2 is that of step 0 again."""

    def planted(key: list[int], step: int, first: int, last: int, device: torch.device) -> Any:
        if step > 1:
            hit()
        return original(key, step % 2, first, last, device)

    return planted
