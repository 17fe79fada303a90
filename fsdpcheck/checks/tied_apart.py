"""Checks of a weight that layers of two sharding units share: it is refused, or trained as on a single device.

Each unit shards what it finds in its modules, and gathers and frees it by itself: a weight of two of them is either
theirs together, or two weights from the first step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import LayerSpec, TrainingCase
from fsdpcheck.checks.refused_samples import assert_refused_or_trained
from fsdpcheck.errors import NotApplicable
from fsdpcheck.execution import Execution
from fsdpcheck.oracle import Answer

_TRAIT = "tied-apart"
_UNTIED = (
    "each unit keeps a parameter of its own of a weight that two share: refuse it, or give it to a unit around both"
)
_BEHIND = "with two Linear layers behind the input, each a unit, that share one weight"


def with_tied_units(case: TrainingCase, features: Features) -> TrainingCase:
    """The case with two layers behind its input, each a unit of its own, that share one weight and no bias.

    Raises NotApplicable where they would demand what the implementation does not accept besides.
    """
    model = case.model
    first, second = LayerSpec(model.features), LayerSpec(model.features, activation="relu")
    layers = (first, second, *model.layers)
    found = replace(
        case, model=replace(model, layers=layers, tied=(0, 1), units=(1,) * (len(layers) + model.has_front))
    )
    if missing := found.requires() - features.accepts - {_TRAIT}:
        raise NotApplicable(
            f"two units with one weight would demand {', '.join(sorted(missing))}, which is not accepted"
        )
    return found


def assert_refused_or_tied(
    execution: Execution, answer: Answer, without: Callable[[], tuple[Execution, Answer]]
) -> None:
    """The weight is refused or trained as one (see refused_samples.assert_refused_or_trained)."""
    assert_refused_or_trained(execution, answer, without, _BEHIND, _UNTIED)
