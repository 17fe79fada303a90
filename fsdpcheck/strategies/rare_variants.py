"""What happens in few trainings and is thought of in none: one of it, in a share of all cases.

Drawn last, of a case that is whole without it, so that everything before is drawn as it would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Dtype, LayerSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.case.model import Used
from fsdpcheck.case.shapes import Stage, stages
from fsdpcheck.strategies import adjustments

Variant = Callable[[], TrainingCase]
"""Makes a case."""

_AS_IT_IS = 2
"""Of this many cases, for each unusual one that may stand in its place, one is left as it is."""
_LONG = 6
"""Steps of a long training."""
_WIDE = 150
"""Numbers of a wide input: a weight of seven rows is then more than 1,024 elements."""


def variants(case: TrainingCase, features: Features, steps: Sequence[int]) -> list[Variant]:
    """The case itself, and with one thing changed each, what ``features`` takes; the plainest first, two at least.

    One of them is drawn, so each is made only when it is called.
    """
    found = [*_of_the_step(case, features, steps), *_of_the_model(case, features, steps)]
    found += [partial(replace, one) for one in _of_several_fields(case, features, steps) if features.takes(one)]
    return [lambda: case] * max(2, _AS_IT_IS * len(found)) + found


def _of_the_step(case: TrainingCase, features: Features, steps: Sequence[int]) -> Iterator[Variant]:
    """Changes that demand nothing but what stands beside them."""
    step, accepts = case.step, features.accepts
    optimizer = replace(step.optimizer, groups="vectors apart")
    possible: tuple[tuple[bool, dict[str, Any]], ...] = (
        ("evaluation" in accepts, {"evaluates": "no_grad"}),
        ({"evaluation", "inference-mode"} <= accepts, {"evaluates": "inference_mode"}),
        ("rebuilt" in accepts, {"rebuilds": True}),
        ("parameter-groups" in accepts and optimizer.kind != "own", {"optimizer": optimizer}),
        (max(steps) > 2 and case.arithmetic.project, {"steps": _LONG}),
        ("secure-noise" in accepts and step.private, {"secure_noise": True}),
    )
    if features.takes(case):
        yield from (partial(_with_step, case, **change) for taken, change in possible if taken)


def _of_several_fields(case: TrainingCase, features: Features, steps: Sequence[int]) -> Iterator[TrainingCase]:
    """What takes more than one field, and has laws of its own too: adjustments, of who accepts it."""
    accepts = features.accepts
    found = [adjustments.of_unequal_numbers(case, features)] if "unequal-micro-batches" in accepts else []
    plain = not case.step.private and case.arithmetic.numbers == "grid"
    if plain and max(steps) > 1 and {"thawed", "frozen-again", "frozen"} <= accepts and case.arithmetic.project:
        found.append(adjustments.thawed(case, features))
    if plain and {"tied-apart", "tied"} <= accepts and case.model.input in ("vector", "sequence", "tokens"):
        found.append(adjustments.tied_apart(case, features))
    yield from (one for one in found if one is not None)


def _of_the_model(case: TrainingCase, features: Features, steps: Sequence[int]) -> Iterator[Variant]:
    """Changes of a layer, of which shapes follow; one that some samples leave out has a step behind it."""
    if case.arithmetic.numbers == "grid" and case.arithmetic.compute == "dtype":
        for one in _with_layer(case, "routed"):
            if features.takes(one):
                yield from (partial(_of_steps, one, features, number) for number in sorted({*steps}))
        for used in ("twice", "for all", "dropped"):
            yield from (partial(replace, one) for one in _with_layer(case, used) if features.takes(one))
    yield from (partial(replace, one) for one in (*_wider(case), *_bare(case)) if features.takes(one))


def stays_exact(step: StepSpec, dtype: Dtype) -> bool:
    """Whether nearly all cases of such a step are exact in every one without a projection.

    Then there is none: it would heal a rank that trains other parameters than it shows, before they can have an effect.
    """
    plain = step.optimizer.kind == "sgd" and not step.optimizer.momentum and not step.optimizer.weight_decay
    unclipped = step.clipping in ("none", "unclipped")
    return step.steps == 1 or (step.steps == 2 and plain and unclipped and dtype == "float64")


def _of_steps(case: TrainingCase, features: Features, number: int) -> TrainingCase:
    """So many steps, projected in between where they are and were not, and need it."""
    step = replace(case.step, steps=number)
    project = case.arithmetic.project or (
        "project" in features.accepts and not stays_exact(step, case.arithmetic.dtype)
    )
    return replace(case, step=step, arithmetic=replace(case.arithmetic, project=project))


def _with_step(case: TrainingCase, **change: Any) -> TrainingCase:
    return replace(case, step=replace(case.step, **change))


def _with_layer(case: TrainingCase, used: Used) -> Iterator[TrainingCase]:
    """The first layer that gives what it takes is used so; if there is none the last, a Linear made one."""
    model = case.model
    for place, stage in enumerate(stages(model)[model.has_front :]):
        if stage.spec is None or place in (model.tied or ()) or stage.channels_first:
            continue
        last = place == len(model.layers) - 1
        if stage.entering == stage.leaving or (last and _may_be_square(case, stage)):
            square = replace(stage.spec, width=stage.entering[-1]) if stage.kind == "linear" else stage.spec
            yield replace(case, model=_exchanged(model, place, replace(square, used=used)))
            return


def _may_be_square(case: TrainingCase, stage: Stage) -> bool:
    """Whether the layer can be given as many rows as it has columns, without a trait that the case has not."""
    rows, ranks = stage.entering[-1], case.mesh.row_ranks
    return stage.kind == "linear" and rows % ranks == 0 and case.step.loss != "cross_entropy"


def _exchanged(model: ModelSpec, place: int, layer: LayerSpec) -> ModelSpec:
    return replace(model, layers=(*model.layers[:place], layer, *model.layers[place + 1 :]))


def _bare(case: TrainingCase) -> Iterator[TrainingCase]:
    """Units of one layer are the layers themselves."""
    model = case.model
    if 1 in model.units and model.tied is None and case.step.clip_groups == "all" and _once(model):
        yield replace(case, model=replace(model, bare_units=True))


def _once(model: ModelSpec) -> bool:
    return all(layer.used == "once" for layer in model.layers)


def _wider(case: TrainingCase) -> Iterator[TrainingCase]:
    """Rows of the first weight are long, where nothing else has their length, and sums of them have the bits."""
    model = case.model
    plain = model.input in ("vector", "sequence") and not model.layer_norm and model.tied is None
    first = bool(model.layers) and model.layers[0].kind == "linear" and model.layers[0].used == "once"
    if plain and first and case.arithmetic.dtype == "float64":
        yield replace(case, model=replace(model, features=_WIDE))
