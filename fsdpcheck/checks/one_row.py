"""Checks of a layer that runs on one row for all samples: it is refused, or each sample has its norm all the same.

What reaches such a layer in the backward is already summed over the samples: nobody can tell from it what the gradient
of one of them is. A learned table of positions, looked up once for a whole batch, is the common case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import LayerSpec, ModelSpec, TrainingCase
from fsdpcheck.checks.clipping import assert_norms_exact
from fsdpcheck.checks.refused_samples import in_words, refused
from fsdpcheck.errors import NotApplicable
from fsdpcheck.execution import Execution
from fsdpcheck.oracle import Answer

_TRAIT = "one-row-private"
_BEHIND = "with a Linear behind the input that runs on one row of ones and is added to each sample's"


def with_one_row(case: TrainingCase, features: Features) -> TrainingCase:
    """The case with a layer behind its input that runs on one row and is added to all samples, in the first unit.

    Raises NotApplicable where such a layer would demand what the implementation does not accept besides.
    """
    model = case.model
    layer = LayerSpec(model.features, bias="bias" in features.accepts, used="for all")
    units = (model.units[0] + 1, *model.units[1:]) if model.units else ()
    tied = None if model.tied is None else (_behind(model.tied[0]), _behind(model.tied[1]))
    found = replace(case, model=_model(model, layer, units, tied))
    if missing := found.requires() - features.accepts - {_TRAIT}:
        raise NotApplicable(f"a layer for all samples would demand {', '.join(sorted(missing))}, which is not accepted")
    return found


def assert_refused_or_right(execution: Execution, answer: Answer, without: Callable[[], Execution]) -> None:
    """Some rank raised, whatever it is called, or the norms are the exact ones, bit for bit or as the rule bounds.

    ``without``: the case as it was drawn, which completes where the layer is refused.
    """
    if not refused(execution, without):
        with in_words(_BEHIND):
            assert_norms_exact(execution, answer)


def _model(model: ModelSpec, layer: LayerSpec, units: tuple[int, ...], tied: tuple[int, int] | None) -> ModelSpec:
    return replace(model, layers=(layer, *model.layers), units=units, tied=tied)


def _behind(place: int) -> int:
    """Where a layer stands once there is one before all; -1, the Embedding, stays."""
    return place + (place >= 0)
