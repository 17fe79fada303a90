"""Cases on a user's own model: everything but the model is drawn as for any law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hypothesis.strategies import SearchStrategy

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Case, Loss, ModelSpec, OptimizerSpec, StepSpec, TrainingCase, Trait, UserModelSpec
from fsdpcheck.case.traits import ON_GRIDS, not_in_low_precision
from fsdpcheck.strategies import enumeration

Draw = Callable[[Features, tuple[int, ...]], SearchStrategy[Case]]
_TRIED = 20
"""Cases that are looked at to say which of a model's traits an adapter does not accept."""


def cases(
    draw: Draw, features: Features, world_sizes: Sequence[int], own: UserModelSpec, classes: bool
) -> SearchStrategy[Case]:
    """The cases of ``draw`` on the user's model, those that ``features`` accepts. ``classes``: see ``on_model``."""
    return _drawn(draw, features, world_sizes, own, classes).filter(features.takes)


def not_accepted(draw: Draw, features: Features, world_sizes: Sequence[int], own: UserModelSpec, classes: bool) -> str:
    """Why no case of a law can be drawn: what the model demands and the adapter does not accept; "" if some can."""
    drawn = enumeration.distinct(_drawn(draw, features, world_sizes, own, classes), _TRIED)
    unmet = [case.requires() - features.accepts for case in drawn]
    if not unmet or not all(unmet):
        return ""
    always: frozenset[Trait] = frozenset.intersection(*unmet) or unmet[0]
    then = ""
    if features.arithmetic.compute != "dtype" and always <= not_in_low_precision(own=True):
        then = "; next: leave --param-dtype out, for in few bits no case has it"
    elif always <= ON_GRIDS:
        then = "; next: --real, where none of it is on a grid"
    return f"the adapter does not accept {', '.join(sorted(always))}, which the model demands{then}"


def _drawn(
    draw: Draw, features: Features, world_sizes: Sequence[int], own: UserModelSpec, classes: bool
) -> SearchStrategy[Case]:
    """The cases of ``draw`` on the user's model; one that trains nothing is what it is."""
    drawn, own = draw(features, tuple(world_sizes)), replace(own, gauge=features.gauge)
    return drawn.map(lambda case: on_model(own, classes, case) if isinstance(case, TrainingCase) else case)


def _with_steps_that_move(step: StepSpec) -> StepSpec:
    """Adam with the rate 1/2 between steps, in few bits: what is 1 and goes down is projected to 0, and no other moves.

    At smaller rates none does, and a model that computes for ever with copies that were cast once would be right; at
    larger ones so many do that hardly a second step fits the bits. So with SGD: cases of one step have it.
    """
    given = step.optimizer
    if step.steps == 1 or given.kind not in ("sgd", "adam", "adamw") or given.momentum:
        return step
    kind = "adam" if given.kind == "sgd" else given.kind
    return replace(step, optimizer=replace(given, kind=kind, lr_exponent=1, schedule="constant"))


def on_model(own: UserModelSpec, classes: bool, case: TrainingCase) -> TrainingCase:
    """``case`` on the user's model. Weights on a grid are the smallest: a deep model needs the bits.

    ``classes``: whether its batch gives integers as targets.

    In float32 where the model names a dtype, which holds for it as for plain PyTorch, or is to compute in another; then
    inputs are the smallest too. Integers of one that may be ``widened`` have the dtype that was drawn.
    Plain training has the user's own optimizer, if there is one; it leaves the harness's layer beside the model alone.
    Its rate is any number, so that a second step starts on the grid only where parameters are projected.
    """
    loss: Loss = "cross_entropy" if classes and not own.loss else "mse"
    step = replace(case.step, loss=loss, thaws=False, refreezes=False)  # what of theirs is frozen is up to them
    arithmetic = replace(case.arithmetic, weights=1)
    if own.optimizer and not step.private:
        step, own = replace(step, optimizer=OptimizerSpec("own"), resume=False), replace(own, gauge=False)
        if step.steps > 1 and arithmetic.numbers == "grid":
            arithmetic = replace(arithmetic, project=True)
    widened = own.widened and arithmetic.numbers == "grid" and arithmetic.dtype == "float64"
    if arithmetic.compute != "dtype" or (own.names and not widened):
        arithmetic = replace(arithmetic, dtype="float32", inputs=1)
    if step.optimizer.kind in ("newton_schulz", "row_scaled") and arithmetic.dtype == "float32":
        step = replace(step, optimizer=OptimizerSpec())  # their sums take the bits of float64
    if arithmetic.compute != "dtype":
        step = _with_steps_that_move(step)
    return replace(case, model=ModelSpec((), own=own), step=step, arithmetic=arithmetic)
