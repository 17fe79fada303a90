"""What an adapter of one's own needs, in one place that stays: ``from fsdpcheck.adapter import Features``."""

from fsdpcheck.adapters._base import (
    Adapter,
    Batch,
    FactorRule,
    Features,
    GlobalNormRule,
    MicroBatch,
    Observed,
    Promise,
    Setup,
    Shard,
    Trainer,
    Trait,
)

__all__ = [
    "Adapter",
    "Batch",
    "FactorRule",
    "Features",
    "GlobalNormRule",
    "MicroBatch",
    "Observed",
    "Promise",
    "Setup",
    "Shard",
    "Trainer",
    "Trait",
]
