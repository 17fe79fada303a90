"""Drawing the cases of a space, for an implementation with certain features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Case, TrainingCase, Trait
from fsdpcheck.case.traits import not_in_low_precision
from fsdpcheck.strategies import low_precision, samplers_and_kernels, training
from fsdpcheck.strategies.adjustments import ADJUSTMENTS
from fsdpcheck.strategies.choice import among
from fsdpcheck.strategies.space import BuiltSpace, CaseSpace, KernelSpace, SamplerSpace, Space

WORLD_SIZES = (1, 2, 3, 4, 5)


def cases_of(space: Space, features: Features, world_sizes: Sequence[int] = WORLD_SIZES) -> st.SearchStrategy[Case]:
    """The cases of ``space`` that an implementation with these features accepts, on one of these numbers of ranks."""
    match space:
        case CaseSpace():
            return _trained(space, features, space.worlds_of(world_sizes))
        case SamplerSpace():
            return samplers_and_kernels.sampled(space, features, world_sizes)
        case KernelSpace():
            return samplers_and_kernels.kernels(space, features)
        case BuiltSpace():
            found = space.build(features, tuple(world_sizes))
            return found if isinstance(found, st.SearchStrategy) else among(found)
    raise TypeError(f"no cases are drawn of a {type(space).__name__}")


def _trained(space: CaseSpace, features: Features, world_sizes: Sequence[int]) -> st.SearchStrategy[TrainingCase]:
    if space.compute == "dtype" and features.arithmetic.compute != "dtype":
        space = space.but(compute=features.arithmetic.compute, tiny_only=True)
    low = not_in_low_precision(own=False) if space.compute != "dtype" else frozenset[Trait]()
    features = replace(features, accepts=features.accepts - space.left_out - low)
    drawn = training.cases(space, features, world_sizes)
    if space.compute != "dtype":
        drawn = low_precision.computed(drawn, space, features)
    for adjustment in space.adjusted:
        drawn = ADJUSTMENTS[adjustment](drawn, features)
    return drawn
