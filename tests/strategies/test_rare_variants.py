"""What happens in few trainings: one thing of it a case, and only what an implementation takes."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import Arithmetic, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.strategies import adjustments, enumeration, metamorphic, rare_variants
from fsdpcheck.strategies.adjustments import ADJUSTMENTS

ALL = Features(frozenset({"plain"}), frozenset(get_args(Trait)))
NONE = Features(frozenset({"plain"}))
STEPS = (1, 2, 3)
PLAIN = Arithmetic(project=False)
CASE = TrainingCase(ModelSpec((LayerSpec(3), LayerSpec(2)), features=3, units=(2,)), arithmetic=PLAIN)
NEW: frozenset[Trait] = frozenset(
    {
        "routed",
        "routed-alone",
        "reused",
        "one-row",
        "dropped",
        "evaluation",
        "inference-mode",
        "rebuilt",
        "parameter-groups",
    }
)


def variants(case: TrainingCase, features: Features = ALL, steps: tuple[int, ...] = STEPS) -> list[TrainingCase]:
    return [made() for made in rare_variants.variants(case, features, steps)]


def changed(case: TrainingCase, features: Features = ALL) -> list[TrainingCase]:
    return [one for one in variants(case, features) if one != case]


def test_each_has_one_unusual_thing_and_two_in_three_cases_have_none() -> None:
    found = changed(CASE)
    assert {trait for one in found for trait in one.requires() & NEW} == NEW - {"routed-alone"}
    for one in found:
        assert len(one.requires() & NEW - {"inference-mode"}) <= 1
    assert len(variants(CASE)) == 3 * len(found)


def test_a_layer_that_some_samples_leave_out_meets_each_number_of_steps() -> None:
    """A rank's gradient of an earlier step is where a later one has none: one step alone shows nothing of it."""
    routed = [one for one in changed(CASE) if "routed" in one.requires()]
    assert [one.step.steps for one in routed] == [*STEPS]


def test_only_what_is_taken_is_drawn_and_there_is_always_a_choice() -> None:
    assert [one for one in changed(CASE, NONE) if one.requires() & NEW] == []
    bare = TrainingCase(ModelSpec((LayerSpec(3),), "signal", length=2), arithmetic=PLAIN)
    assert variants(bare, NONE) == [bare, bare]
    some = Features(frozenset({"plain"}), frozenset({"evaluation"}))
    assert [one.step.evaluates for one in changed(CASE, some) if one.requires() & NEW] == ["no_grad"]
    for accepted in (ALL.accepts, *({trait} for trait in NEW)):
        taken = Features(frozenset({"plain"}), frozenset(accepted))
        assert all(map(taken.takes, changed(CASE, taken)))


def test_a_unit_that_may_be_left_out_is_drawn_where_it_is_taken() -> None:
    alone = TrainingCase(ModelSpec((LayerSpec(3), LayerSpec(2)), features=3, units=(1, 1)), arithmetic=PLAIN)
    assert any("routed-alone" in one.requires() for one in changed(alone))
    inside = Features(ALL.promises, ALL.accepts - {"routed-alone"})
    assert not any("routed" in one.requires() for one in changed(alone, inside))


def test_units_of_one_layer_are_bare_where_nothing_else_calls_the_layer_or_has_its_weight() -> None:
    layers = (LayerSpec(3), LayerSpec(3), LayerSpec(3))
    model = ModelSpec(layers, features=3, units=(1, 2))
    assert sum(one.model.bare_units for one in changed(TrainingCase(model, arithmetic=PLAIN))) == 1
    twice = replace(model, layers=(LayerSpec(3, used="twice"), *layers[1:]))
    apart = StepSpec(clipping="exact", clip_groups="units")
    for case in (
        TrainingCase(replace(model, units=(2,)), arithmetic=PLAIN),
        TrainingCase(twice, arithmetic=PLAIN),
        TrainingCase(replace(model, tied=(0, 1)), arithmetic=PLAIN),
        TrainingCase(model, step=apart, arithmetic=PLAIN),
    ):
        assert not any(one.model.bare_units for one in changed(case))


def test_what_groups_layers_otherwise_or_puts_one_before_them_has_no_bare_units() -> None:
    bare = TrainingCase(
        ModelSpec((LayerSpec(3), LayerSpec(3)), features=3, units=(1, 1), bare_units=True), arithmetic=PLAIN
    )
    others = [*metamorphic._groupings(bare)]
    apart = adjustments.tied_apart(bare, ALL)
    (used,) = enumeration.distinct(
        ADJUSTMENTS["beside"](st.just(replace(bare, step=StepSpec(clipping="probe"))), ALL), 1
    )
    assert apart is not None
    assert not any(one.model.bare_units for one in (*others, apart, used))
    assert {one.model.units for one in others} > {(1, 1), (2,)}


def test_a_last_linear_is_made_square_where_its_rows_stay_as_even_as_they_were() -> None:
    model = ModelSpec((LayerSpec(3), LayerSpec(2)), features=2, units=(2,))
    assert any(
        one.model.layers[1] == LayerSpec(3, used="twice") for one in changed(TrainingCase(model, arithmetic=PLAIN))
    )
    over_two = TrainingCase(model, MeshSpec(2), arithmetic=PLAIN)
    assert not any(layer.used != "once" for one in changed(over_two) for layer in one.model.layers)


def test_long_trainings_need_a_projection_and_wide_rows_the_bits_of_float64() -> None:
    assert not any(one.step.steps > 3 for one in changed(CASE))
    projected = TrainingCase(CASE.model, step=StepSpec(steps=2))
    assert any(one.step.steps > 3 for one in changed(projected))
    assert not any(one.step.steps > 3 for one in variants(projected, steps=(1,)))
    assert any(one.model.features > 128 for one in changed(CASE))
    narrow = TrainingCase(CASE.model, arithmetic=Arithmetic("float32", project=False))
    assert not any(one.model.features > 128 for one in changed(narrow))
