"""What an adapter of one's own needs, in one place that stays: ``from fsdpcheck.adapter import Features``."""

from fsdpcheck.adapters._base import (
    Adapter,
    Batch,
    Compute,
    FactorRule,
    Features,
    GlobalNormRule,
    MicroBatch,
    Moment,
    Observed,
    Promise,
    Setup,
    Shard,
    Trainer,
    Trait,
    Use,
)
from fsdpcheck.adapters._plugs import Drawn, Kernel, Kernels, Sampler, SamplerSetup, Sampling
from fsdpcheck.case.sampling import SamplingSpec

__all__ = [
    "Adapter",
    "Batch",
    "Compute",
    "Drawn",
    "FactorRule",
    "Features",
    "GlobalNormRule",
    "Kernel",
    "Kernels",
    "MicroBatch",
    "Moment",
    "Observed",
    "Promise",
    "Sampler",
    "SamplerSetup",
    "Sampling",
    "SamplingSpec",
    "Setup",
    "Shard",
    "Trainer",
    "Trait",
    "Use",
]
