"""What a space may change in every case that is drawn, by name (``space.Adjustment``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import LayerSpec, OptimizerKind, TrainingCase, Trait
from fsdpcheck.case.model import Mask, Used
from fsdpcheck.case.training import Across, Evaluation
from fsdpcheck.case.validation import is_power_of_two, whole_or_float
from fsdpcheck.errors import InvalidCase
from fsdpcheck.strategies import metamorphic
from fsdpcheck.strategies.choice import among
from fsdpcheck.strategies.space import Adjustment

_SEVERAL_STEPS = 5
"""Steps of a training that leaves a layer out in some of them."""
_MEETING: tuple[Used, ...] = ("across", "reordered")
_COMPARED: tuple[Across, ...] = ("outputs", "targets")
"""Where samples meet: layers, and losses."""
Adjust = Callable[[SearchStrategy[TrainingCase], Features], SearchStrategy[TrainingCase]]


@st.composite
def _of_any_sum(draw: st.DrawFn, drawn: SearchStrategy[TrainingCase], features: Features) -> TrainingCase:
    """Of who averages after the sum also cases whose sums W does not divide, where they can be right.

    These are what a division before the sum rounds otherwise.
    """
    case = draw(drawn)
    wanted = draw(st.booleans())  # in any case, or the simpler case would have more draws
    return _undivided(case, features) if wanted else case


def _undivided(case: TrainingCase, features: Features) -> TrainingCase:
    """The case with losses that do not carry W, and N a multiple of W, if its one average is the only rounding."""
    step, arithmetic = case.step, case.arithmetic
    rounds_once = step.reductions == 1 and case.mesh.dp_replicate == 1 and arithmetic.averaging == "divide"
    stays = step.steps == 1 or arithmetic.project  # otherwise the second step starts off the grid
    otherwise = features.arithmetic.averaging != "after"
    if otherwise or is_power_of_two(case.mesh.data_ranks) or not (rounds_once and stays):
        return case
    if case.layout.kind != "replicated" and is_power_of_two(step.normaliser):
        step = replace(step, normaliser=whole_or_float(Fraction(step.normaliser) * case.mesh.data_ranks))
    return replace(case, step=step, arithmetic=replace(arithmetic, world_factors=0))


def _in_one_step(case: TrainingCase) -> TrainingCase:
    return replace(case, step=case.step.of_steps(1))


def _of_any_clip_norm(drawn: SearchStrategy[TrainingCase], features: Features) -> SearchStrategy[TrainingCase]:
    """As they are drawn, or with a clip norm above every norm."""
    return drawn.flatmap(lambda case: among([_clipped_at(case, c) for c in (case.step.clip_norm, 1 << 40)]))


def _clipped_at(case: TrainingCase, clip_norm: int) -> TrainingCase:
    return replace(case, step=replace(case.step, clip_norm=clip_norm))


def _with_a_bias(drawn: SearchStrategy[TrainingCase], features: Features) -> SearchStrategy[TrainingCase]:
    """A model's only layer has a bias, where one is accepted."""
    return drawn.map(_biased) if "bias" in features.accepts else drawn


def _biased(case: TrainingCase) -> TrainingCase:
    only, *others = case.model.layers
    if others or only.kind == "rms_norm":
        return case
    return replace(case, model=replace(case.model, layers=(replace(only, bias=True),)))


def _of_partial_terms(case: TrainingCase) -> TrainingCase:
    return replace(case, step=replace(case.step, contribution="partial"))


def _on_real_numbers(case: TrainingCase) -> TrainingCase:
    """Masks that look at a number are left out: rounding may bring it below zero."""
    real: dict[Mask, Mask] = {"keys": "none", "both": "causal"}
    layers = tuple(replace(layer, mask=real.get(layer.mask, layer.mask)) for layer in case.model.layers)
    model = replace(case.model, layers=layers)
    arithmetic = replace(case.arithmetic, numbers="real", project=False, averaging="divide")
    return replace(case, model=model, arithmetic=arithmetic)


def _evaluated(drawn: SearchStrategy[TrainingCase], features: Features) -> SearchStrategy[TrainingCase]:
    """Every case evaluates, half of them in inference mode where that is accepted."""
    inference = "inference-mode" in features.accepts
    return drawn.map(lambda case: _evaluated_in(case, "inference_mode" if inference and case.seed % 2 else "no_grad"))


def _evaluated_in(case: TrainingCase, context: Evaluation) -> TrainingCase:
    return replace(case, step=replace(case.step, evaluates=context))


def thawed(case: TrainingCase, features: Features) -> TrainingCase | None:
    """Its first layer that shares no weight is frozen in the first step and thawed behind it; None if all share one.

    In a share of the cases, all in which parameters are rounded between steps, it is frozen again behind the second.
    """
    layers = list(case.model.layers)
    place = next((n for n in range(len(layers)) if n not in (case.model.tied or ())), None)
    if place is None:
        return None
    layers[place] = replace(layers[place], frozen="all" if layers[place].bias else "weight")
    again = case.arithmetic.project or bool(case.seed % 2)
    step = replace(case.step, steps=case.step.steps + 1 + again, thaws=True, refreezes=again)
    return replace(case, model=replace(case.model, layers=tuple(layers)), step=step)


def tied_apart(case: TrainingCase, features: Features) -> TrainingCase | None:
    """Two layers stand behind its input, each a unit of its own, that share one weight and have no bias."""
    model = case.model
    layers = (LayerSpec(model.features), LayerSpec(model.features, activation="relu"), *model.layers)
    units = (1,) * (len(layers) + model.has_front)
    found = replace(case, model=replace(model, layers=layers, tied=(0, 1), units=units, bare_units=False))
    return _taken(found, features, "tied", "tied-apart")


def _with_one_row(case: TrainingCase, features: Features) -> TrainingCase | None:
    """A layer stands behind its input that runs on one row and is added to all samples, in the first unit."""
    layer = LayerSpec(case.model.features, bias="bias" in features.accepts, used="for all")
    return _taken(_behind_its_input(case, layer), features, "one-row-private")


def _beside(case: TrainingCase, features: Features) -> TrainingCase | None:
    """A Linear stands behind its input whose weight is used once more beside it, in the first unit."""
    layer = LayerSpec(case.model.features, bias="bias" in features.accepts, used="beside")
    return _taken(_behind_its_input(case, layer), features, "beside-private")


def _across_samples(case: TrainingCase, features: Features) -> TrainingCase | None:
    """Samples of a micro-batch meet: in the output of a layer behind its input, in the order in which it is given them,
    or in the loss, which takes outputs or targets of two. None where each micro-batch has one at most, or targets are
    all of one class.
    """
    how = case.seed % 4
    one_class = case.step.loss == "cross_entropy" and case.model.layers[-1].width == 1
    if max(case.local_sizes) <= case.step.micro_batches or (how == 3 and one_class):
        return None
    if how < 2:
        layer = LayerSpec(case.model.features, bias="bias" in features.accepts, used=_MEETING[how])
        found = _behind_its_input(case, layer)
    else:
        found = replace(case, step=replace(case.step, across=_COMPARED[how - 2]))
    return _taken(found, features, "across-samples-private")


def _left_out(case: TrainingCase, features: Features) -> TrainingCase | None:
    """A layer stands behind its input that some samples leave out, and Adam or AdamW takes several steps."""
    step, project = case.step, "project" in features.accepts
    kinds: tuple[OptimizerKind, ...] = ("adam", "adamw") if "adamw" in features.accepts else ("adam",)
    optimizer = replace(step.optimizer, kind=kinds[case.seed % len(kinds)], momentum=0.0)
    step = replace(step, optimizer=optimizer, steps=_SEVERAL_STEPS if project else max(step.steps, 2))
    changed = replace(case, step=step, arithmetic=replace(case.arithmetic, project=project))
    return _taken(_behind_its_input(changed, LayerSpec(case.model.features, used="routed")), features)


def _grouped(case: TrainingCase, features: Features) -> TrainingCase:
    """In half of the cases the last unit is a group of parameters of its own, where that is accepted."""
    optimizer, model = replace(case.step.optimizer, groups="last unit apart"), case.model
    if not case.seed % 2 or case.step.optimizer.groups != "one" or not model.units or model.tied is not None:
        return case
    return _taken(replace(case, step=replace(case.step, optimizer=optimizer)), features) or case


def _evaluated_at_times(case: TrainingCase, features: Features) -> TrainingCase:
    """In the other half of the cases a forward without gradients runs before each step, and before each load."""
    return case if case.seed % 2 else _taken(_evaluated_in(case, "no_grad"), features) or case


def _secure_at_times(case: TrainingCase, features: Features) -> TrainingCase:
    """In a quarter of the cases noise is the secure generator's, where that is accepted."""
    step = replace(case.step, secure_noise=True)
    return case if case.seed % 4 != 3 else _taken(replace(case, step=step), features) or case


def _with_rows_for_many(case: TrainingCase, features: Features) -> TrainingCase:
    """Where 16 ranks write a checkpoint the last layer has 16 rows, so that each of them has something to write.

    Unless its shape is another's too, or that of what it is given.
    """
    *others, last = case.model.layers
    if not metamorphic.many_write(case) or last.kind != "linear":
        return case
    try:
        wide = replace(case, model=replace(case.model, layers=(*others, replace(last, width=16))))
    except InvalidCase:
        return case
    return _taken(wide, features) or case


def _behind_its_input(case: TrainingCase, layer: LayerSpec) -> TrainingCase:
    """The case with one layer more, before all that it has but an Embedding, in the first unit."""
    model = case.model
    units = (model.units[0] + 1, *model.units[1:]) if model.units else ()
    tied = None if model.tied is None else (_behind(model.tied[0]), _behind(model.tied[1]))
    model = replace(model, layers=(layer, *model.layers), units=units, tied=tied, bare_units=False)
    return replace(case, model=model)


def of_unequal_numbers(case: TrainingCase, features: Features) -> TrainingCase | None:
    """Several micro-batches, of which some ranks have one fewer; None where ranks have the same samples, or a mean."""
    if case.shares < 2 or case.copies > case.mesh.model_ranks or case.step.reduction == "mean":
        return None
    step = replace(case.step, micro_batches=max(2, case.step.micro_batches), sync_every=False, unequal=True)
    arithmetic = case.arithmetic
    if features.arithmetic.averaging == "before":  # losses carry W once for each reduction
        arithmetic = replace(arithmetic, world_factors=step.reductions)
    return _taken(replace(case, step=step, arithmetic=arithmetic), features)


def _behind(place: int) -> int:
    """Where a layer stands once there is one before all; -1, the Embedding, stays."""
    return place + (place >= 0)


def _taken(case: TrainingCase, features: Features, *besides: Trait) -> TrainingCase | None:
    """The case, if it demands nothing that is not accepted but what is ``besides``."""
    return case if features.takes(case, frozenset(besides)) else None


def _where_it_can_be(change: Callable[[TrainingCase, Features], TrainingCase | None]) -> Adjust:
    def adjust(drawn: SearchStrategy[TrainingCase], features: Features) -> SearchStrategy[TrainingCase]:
        return drawn.map(lambda case: change(case, features)).filter(lambda case: case is not None)  # type: ignore[return-value]

    return adjust


def _each(change: Callable[[TrainingCase], TrainingCase]) -> Adjust:
    return lambda drawn, features: drawn.map(change)


ADJUSTMENTS: dict[Adjustment, Adjust] = {
    "any sum": _of_any_sum,
    "one step": _each(_in_one_step),
    "any clip norm": _of_any_clip_norm,
    "a bias": _with_a_bias,
    "partial terms": _each(_of_partial_terms),
    "in replicas": _each(metamorphic.in_replicas),
    "on real numbers": _each(_on_real_numbers),
    "evaluated": _evaluated,
    "thawed": _where_it_can_be(thawed),
    "tied apart": _where_it_can_be(tied_apart),
    "one row": _where_it_can_be(_with_one_row),
    "beside": _where_it_can_be(_beside),
    "across samples": _where_it_can_be(_across_samples),
    "grouped": lambda drawn, features: drawn.map(lambda case: _grouped(case, features)),
    "evaluated at times": lambda drawn, features: drawn.map(lambda case: _evaluated_at_times(case, features)),
    "secure at times": lambda drawn, features: drawn.map(lambda case: _secure_at_times(case, features)),
    "rows for many": lambda drawn, features: drawn.map(lambda case: _with_rows_for_many(case, features)),
    "left out": _where_it_can_be(_left_out),
    "unequal micro-batches": _where_it_can_be(of_unequal_numbers),
}
