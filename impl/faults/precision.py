"""Planted bugs of one sample's numbers: off by a part in 10**3 to 10**12, rounded, left out, twice, exchanged."""

from __future__ import annotations

from typing import Any

import torch

from ._fault import Fault, Function, Hit, fault


def _factor_off(exponent: int) -> Fault:
    """The fault that changes the first local sample's clip factor by a part in 10**exponent."""

    def plant(original: Function, hit: Hit) -> Function:
        return _first_sample_times(1 - 10.0**-exponent, original, hit)

    plant.__name__ = f"factor_off_by_1e_{exponent}"
    plant.__doc__ = f"The clip factor of a micro-batch's first sample is too small by a part in 10**{exponent}."
    return fault(
        "clipping.clip_factors:factors",
        "a small numerical error in one factor",
        "clipping.coefficients",
        cause=f"factor of the first sample .* -1.0e-{exponent:02d}",
    )(plant)


def _norm_off(exponent: int) -> Fault:
    """The fault that changes the first local sample's squared norm by a part in 10**exponent."""

    def plant(original: Function, hit: Hit) -> Function:
        return _first_sample_times(1 - 10.0**-exponent, original, hit)

    plant.__name__ = f"squared_norm_off_by_1e_{exponent}"
    plant.__doc__ = f"The squared norm of a micro-batch's first sample is too small by a part in 10**{exponent}."
    return fault(
        "clipping.norm_aggregation:squared_norms",
        "an under-estimated norm breaks the guarantee",
        "clipping.norms",
        cause=f" norm of the first sample .* -5.0e-{exponent + 1:02d}",
    )(plant)


def _first_sample_times(factor: float, original: Function, hit: Hit) -> Function:
    """``original`` whose result, [b] or by groups [G, b], has the first sample's numbers times ``factor``."""

    def planted(*arguments: Any) -> Any:
        found = original(*arguments).clone()
        if found.numel():
            hit()
            found[..., 0] *= factor
        return found

    return planted


@fault(
    "clipping.norm_aggregation:squared_norms",
    "squared norms in half precision, https://github.com/google-deepmind/jax_privacy/pull/309",
    "norms.one-sided",
    cause="squared norms are rounded to 24 bits, the precision of float32",
)
def squared_norms_in_float32(original: Function, hit: Hit) -> Function:
    """Squared norms pass through float32: nothing is lost of small integers, and seven digits are left of the rest."""

    def planted(*arguments: Any) -> Any:
        found = original(*arguments)
        if found.dtype == torch.float64 and found.numel():
            hit()
            return found.float().double()
        return found

    return planted


@fault(
    "clipping.norm_aggregation:squared_norms",
    "squared norms that underflow, https://github.com/google-deepmind/jax_privacy/pull/309",
    "norms.scaling",
    cause="small norms are replaced by",
)
def squared_norms_have_a_floor(original: Function, hit: Hit) -> Function:
    """Squared norms are at least 1e-12, for the sake of a division: small gradients have a norm of 1e-6."""

    def planted(*arguments: Any) -> Any:
        found = original(*arguments)
        if found.numel():
            hit()
        return found.clamp(min=1e-12)

    return planted


factor_off_by_1e_3, factor_off_by_1e_6, factor_off_by_1e_9, factor_off_by_1e_12 = map(_factor_off, (3, 6, 9, 12))
squared_norm_off_by_1e_3, squared_norm_off_by_1e_6 = map(_norm_off, (3, 6))
squared_norm_off_by_1e_9, squared_norm_off_by_1e_12 = map(_norm_off, (9, 12))


@fault(
    "clipping.private_backward:PrivateBackward.clip_factors",
    "a sample lost between the passes",
    "training.private-gradients",
    cause="first sample of each micro-batch is left out",
)
def sample_dropped_in_second_pass(original: Function, hit: Hit) -> Function:
    """The first sample of each micro-batch has no weight in the second backward; its reported factor is right."""
    return _first_sample_times(0.0, original, hit)


@fault(
    "clipping.private_backward:PrivateBackward.clip_factors",
    "a sample counted twice",
    "rounding.private-gradients",
    cause="first sample of each micro-batch is counted twice",
)
def sample_doubled_in_second_pass(original: Function, hit: Hit) -> Function:
    """The first sample of each micro-batch counts twice in the second backward; its reported factor is right."""
    return _first_sample_times(2.0, original, hit)


@fault(
    "clipping.private_backward:PrivateBackward.clip_factors",
    "factors in another order than the losses",
    "clipping.coefficients",
    cause="first two samples .* exchanged",
)
def factors_swapped(original: Function, hit: Hit) -> Function:
    """The first two samples of each micro-batch are weighted by each other's factor; reported factors are right."""

    def planted(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        if found.shape[-1] < 2:
            return found
        hit()
        return torch.cat([found[..., :2].flip(-1), found[..., 2:]], -1)

    return planted
