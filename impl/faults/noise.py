"""Planted bugs of noise: drawn by place in a shard, by replica, again, too often, off in scale, or on padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..fault import Function, Hit, fault


@fault(
    "noise:Noise.add_",
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
    "private:PrivateBackward.add_noise",
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
    "private:PrivateBackward.add_noise",
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
    "noise:Noise.add_",
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
    "private:PrivateBackward.add_noise",
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
    "private:PrivateBackward.add_noise",
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
    "private:Privacy.deviation",
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
