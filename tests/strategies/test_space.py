"""Spaces of cases: derived, compared, refused, told in words, and drawn."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis.errors import Unsatisfiable

from fsdpcheck import strategies
from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import Trait
from fsdpcheck.errors import UsageError
from fsdpcheck.judging.registry import chapters
from fsdpcheck.strategies import PLAIN, PRIVATE_PROBE, BuiltSpace, CaseSpace, Family, KernelSpace, enumeration
from fsdpcheck.strategies.adjustments import ADJUSTMENTS
from fsdpcheck.strategies.space import Adjustment
from tests.common.cases_by_hand import SMALLEST
from tests.common.tables import each

ALL: frozenset[Trait] = frozenset(get_args(Trait))
EVERYTHING = Features(frozenset(get_args(Promise)), ALL)


def test_spaces_with_the_same_fields_are_equal_and_hash_alike() -> None:
    one, two = PLAIN.without("hsdp").without("tied"), CaseSpace(clipping=("none",)).without("tied", "hsdp")
    assert one == two
    assert len({one, two, PLAIN}) == 2
    assert PLAIN.left_out == frozenset()
    with pytest.raises(FrozenInstanceError):
        PLAIN.units = 3  # type: ignore[misc]


def test_what_changes_no_case_is_not_among_what_is_drawn() -> None:
    told = PLAIN.but(must_occur=("hsdp",), vacuous_without=("several ranks",), user_models="never")
    assert told != PLAIN
    assert told.drawn == PLAIN
    assert {told.but(steps=(2, 3)).drawn, told.but(ranks=2).drawn, PLAIN.drawn} == {
        PLAIN.but(steps=(2, 3)), PLAIN.but(ranks=2), PLAIN,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "got", "hint"),
    [
        (lambda: PLAIN.without("hdsp"), "'hdsp'", "Did you mean 'hsdp'?"),  # type: ignore[arg-type]
        (lambda: PLAIN.but(step=(2,)), "'step'", "Did you mean 'steps'?"),
        (lambda: PLAIN.but(adjusted=("one stop",)), "'one stop'", "Did you mean 'one step'?"),
        (lambda: PLAIN.but(clipping=("exactly",)), "'exactly'", "Did you mean 'exact'?"),
        (lambda: Family("exact", ("exact-factor",)), "'exact-factor'", "Did you mean 'exact-factors'?"),
    ],
)
def test_an_unknown_word_is_refused_and_the_right_one_named(make: Any, got: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        make()
    assert f"\n  got     {got}\n  wanted  one of " in str(refused.value)
    assert hint in str(refused.value)


def test_the_words_of_families_are_of_one_kind_each() -> None:
    """One set holds promises, traits and "nested", so none may mean two things."""
    assert {*get_args(Promise)}.isdisjoint({*ALL, "nested"})
    assert "nested" not in ALL


def test_families_are_those_that_hold_of_an_implementation_or_the_first() -> None:
    nested = replace(EVERYTHING, factor=replace(EVERYTHING.factor, nested=True))
    space = CaseSpace(clipping=("unclipped", Family("exact", unless=("nested",)), Family("probe", ("real", "plain"))))
    assert space.families(EVERYTHING) == ("unclipped", "exact", "probe")
    assert space.families(nested) == ("unclipped", "probe")
    assert space.families(replace(nested, accepts=ALL - {"real"})) == ("unclipped",)
    assert strategies.EQUAL_BITS.families(Features(frozenset())) == ("none",)


def test_a_space_says_what_all_its_cases_demand() -> None:
    assert PLAIN.demands == KernelSpace().demands == frozenset()
    assert PLAIN.but(numbers="either").demands == frozenset()
    assert strategies.COUNTABLE.demands == strategies.REAL.demands == {"real"}
    several = PRIVATE_PROBE.but(replicated=True, compute="tf32", adjusted=("in replicas",))
    assert several.demands == {"replicated", "tf32", "replicated-shards", "hsdp"}


def test_worlds_are_those_asked_for_unless_the_space_says_others() -> None:
    assert PLAIN.worlds_of((5, 2)) == (5, 2)
    assert PLAIN.but(worlds=(4, 6)).worlds_of((1, 2)) == (4, 6)
    assert PLAIN.but(most_ranks=3).worlds_of((1, 3, 4)) == (1, 3)
    assert PLAIN.but(most_ranks=3).worlds_of((5, 4)) == (4,)
    replicas = PLAIN.but(adjusted=("in replicas",))
    assert replicas.worlds_of((1, 2, 3, 4, 5, 6, 9)) == (4, 6, 9)
    assert replicas.worlds_of((2, 3)) == (2, 3)


def test_a_space_is_told_by_the_fields_that_narrow_or_widen_it() -> None:
    assert CaseSpace(must_occur=("hsdp",), user_models="never").describe() == "every case"
    space = CaseSpace(clipping=("none", Family("probe", ("private", "real")), Family("exact", unless=("nested",))))
    said = "clipping: none, probe where private and real, exact unless nested; replicated: no; left out: hsdp, tied"
    assert space.but(replicated=False).without("tied", "hsdp").describe() == said
    assert BuiltSpace(build=lambda features, sizes: [SMALLEST], words="one case").describe() == "one case"


def test_cases_that_are_built_are_drawn_as_they_are() -> None:
    listed = BuiltSpace(build=lambda features, sizes: [SMALLEST])
    drawn = BuiltSpace(build=lambda features, sizes: strategies.cases_of(listed, features, sizes))
    for space in (listed, drawn):
        assert enumeration.distinct(strategies.cases_of(space, EVERYTHING), 3) == [SMALLEST]


@each(("adjustment", "trait"), [("thawed", "thawed"), ("tied apart", "tied-apart"), ("one row", "one-row-private")])
def test_what_may_be_refused_is_in_every_case_whether_it_is_accepted_or_not(adjustment: Adjustment, trait: str) -> None:
    """And nothing else that is not accepted; so a case that shows a finding shows what may be refused."""
    space = (PRIVATE_PROBE if adjustment == "one row" else PLAIN.without("tied", "conv")).but(adjusted=(adjustment,))
    features = replace(EVERYTHING, accepts=frozenset({"bias", "frozen", "sequence", "project"}))
    cases = list(enumeration.distinct(strategies.cases_of(space, features, (1, 2, 3)), 40, 0))
    assert len(cases) == 40
    more = {"tied"} if adjustment == "tied apart" else set()
    assert all(trait in one.requires() and one.requires() <= features.accepts | space.added | more for one in cases)


def test_a_layer_that_may_be_left_out_meets_adam_over_several_steps() -> None:
    """Where neither is accepted there is no case."""
    space = PLAIN.without("conv", "bags", "group-norm").but(adjusted=("left out",))
    accepts = frozenset[Trait]({"bias", "tied", "tokens", "sequence", "project", "adam", "adamw", "routed"})
    features = replace(EVERYTHING, accepts=accepts)
    cases = list(enumeration.distinct(strategies.cases_of(space, features, (1, 2, 3)), 40, 0))
    assert len(cases) == 40
    assert all(one.step.steps == 5 and one.model.layers[0].used == "routed" for one in cases)
    assert {one.step.optimizer.kind for one in cases} == {"adam", "adamw"}
    assert all(one.requires() <= accepts for one in cases)
    with pytest.raises(Unsatisfiable):
        enumeration.distinct(
            strategies.cases_of(space, replace(features, accepts=accepts - {"routed"}), (1, 2, 3)), 1, 0
        )


def test_half_of_the_untied_units_are_a_group_where_that_is_accepted() -> None:
    space = PLAIN.but(adjusted=("grouped",))
    cases = list(enumeration.distinct(strategies.cases_of(space, EVERYTHING, (1, 2, 3)), 60, 0))
    grouped = [one.step.optimizer.groups == "last unit apart" for one in cases]
    assert any(grouped)
    possible = [bool(one.seed % 2 and one.model.units and one.model.tied is None) for one in cases]
    assert all(can or not has for can, has in zip(possible, grouped, strict=True))
    less = replace(EVERYTHING, accepts=EVERYTHING.accepts - {"unit-groups"})
    assert all(
        one.requires() <= less.accepts for one in enumeration.distinct(strategies.cases_of(space, less, (2,)), 20, 0)
    )


def test_every_adjustment_is_made() -> None:
    assert set(ADJUSTMENTS) == set(get_args(Adjustment))


def test_laws_share_spaces() -> None:
    """What is drawn for one law can be judged by the others of its space."""
    here = (law for law in chapters().values() if Path(law.where.partition(":")[0]).parent.name == "properties")
    drawn = [law.space.drawn for law in here]
    assert drawn.count(PLAIN) > 5
    assert len(set(drawn)) < 0.7 * len(drawn)


def test_a_change_to_any_field_of_a_law_s_space_but_what_is_told_changes_what_is_drawn() -> None:
    told = {"user_models", "must_occur", "vacuous_without"}
    changed: dict[str, Any] = {
        "ranks": 2, "clipping": ("exact",), "norms": ("deferred",), "contributions": ("partial",), "replicated": True,
        "numbers": "real", "compute": "tf32", "global_norm": True, "tiny_only": True, "steps": (2,), "units": 2,
        "by_unit": (True,), "left_out": frozenset({"hsdp"}), "worlds": (4,), "most_ranks": 2, "adjusted": ("one step",),
    }  # fmt: skip
    assert {one.name for one in fields(CaseSpace)} == {*changed, *told}
    assert len({PLAIN.but(**{name: value}).drawn for name, value in changed.items()} | {PLAIN}) == len(changed) + 1
