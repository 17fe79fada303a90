"""The words of a Literal, which editors know, are the keys of the table that says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from fsdpcheck.adapters import contract
from fsdpcheck.adapters.vocabulary import FEATURES, MOMENTS, OBSERVABLES, PROMISES, Moment, Observable, Promise, Use
from fsdpcheck.case.vocabulary import TRAITS, Trait


@pytest.mark.parametrize(
    ("words", "table"),
    [(Promise, PROMISES), (Use, FEATURES), (Moment, MOMENTS), (Observable, OBSERVABLES), (Trait, TRAITS)],
    ids=["promises", "features", "moments", "observables", "traits"],
)
def test_each_word_has_its_row_in_the_same_order(words: Any, table: Mapping[str, object]) -> None:
    assert list(table) == list(get_args(words))


def test_observables_are_methods_of_a_trainer_that_say_what_they_are() -> None:
    for name, method in OBSERVABLES.items():
        said = getattr(contract.Observed, method).__doc__ or getattr(contract.Trainer, method).__doc__
        assert said, name
        assert name == "params" or said.strip().startswith(f'"{name}"'), name


def test_needs_of_traits_are_names_of_the_contract() -> None:
    for trait, row in TRAITS.items():
        for dotted in (need for need in row.needs if "." in need):
            kind, _, name = dotted.partition(".")
            owner = getattr(contract, kind)
            assert name in {*owner.__annotations__, *vars(owner)}, f"{trait}: {dotted}"
