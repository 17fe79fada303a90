"""What a wrong observable is instead: told where it is measured, with the word of the mistake, and else not."""

from __future__ import annotations

import pytest
import torch

from fsdpcheck.comparison import causes
from fsdpcheck.comparison.causes import Cause
from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.facts import Fact
from fsdpcheck.comparison.record import Key
from fsdpcheck.comparison.results import World
from tests.comparison.observed import observation, rank

_WITHIN = 1e-12
_W, _B, _NORM = Key(0, "gradient", "w"), Key(0, "gradient", "b"), Key(0, "norm", "0")
_BASE = {_W: [3.0, 4.0], _B: [0.5, 0.25]}


def _decision(key: Key, says: str = "differs") -> Decision:
    return Decision(key, says, 1.0, _WITHIN, 1.0, _WITHIN)  # type: ignore[arg-type]


def _told(base: dict[Key, list[float]], whole: dict[Key, list[float]], first: Key) -> list[causes.Cause]:
    tensors = [
        {key: torch.tensor(value, dtype=torch.float64) for key, value in those.items()} for those in (base, whole)
    ]
    decisions = {key: _decision(key, "agrees" if whole.get(key) == base[key] else "differs") for key in base}
    evidence = causes.Evidence(*tensors, observation(rank(), rank()), decisions)
    return [
        cause for cause in causes.causes(decisions[first], evidence) if not cause.text.startswith("what comes before")
    ]


def test_a_factor_is_one_of_all_that_differ() -> None:
    twice = {key: [2 * number for number in value] for key, value in _BASE.items()}
    assert _told(_BASE, twice, _W) == [("factor", "it is W = 2 times that of one rank, as 2 of 2 are")]
    assert _told(_BASE, {**twice, _B: [9.0, 1.0]}, _W) == [("", "it is W = 2 times that of one rank, as 1 of 2 are")]
    other = {key: [1.7 * number for number in value] for key, value in _BASE.items()}
    assert _told(_BASE, other, _W) == [("factor", "it is 1.7 times that of one rank, as 2 of 2 are")]


@pytest.mark.parametrize("added", [0.0, 1e-6])
def test_gradients_that_are_scaled_as_the_norm_is_wrong_were_clipped_by_a_wrong_norm(added: float) -> None:
    scale = (5.0 + added) / (8.0 + added)
    scaled = {key: [number * scale for number in value] for key, value in _BASE.items()}
    (cause,) = _told({**_BASE, _NORM: [5.0]}, {**scaled, _NORM: [8.0]}, _W)
    assert cause.word == "clip norm"
    assert cause.text.endswith("for the norm that they are clipped by is 8 and not 5")
    assert _told({**_BASE, _NORM: [5.0]}, {**scaled, _NORM: [7.0]}, _W)[0].word == "factor"


def test_parameters_that_begin_otherwise_are_drawn_otherwise() -> None:
    key = Key(0, "initial parameter", "w")
    assert [cause.word for cause in _told({key: [1.0, 2.0]}, {key: [5.0, 1.0]}, key)] == ["random"]


def test_copies_of_a_norm_or_of_states_say_what_kind_of_mistake_it_is() -> None:
    parameter, state = Key(3, "parameter", "w"), Key(3, "state momentum_buffer", "w")
    gradient = parameter._replace(kind="gradient")
    assert [cause.word for cause in causes.of_copies(_NORM, [], [])] == ["clip norm"]
    assert [tuple(cause) for cause in causes.of_copies(parameter, [state], [gradient])] == [
        ("state", "its gradient is equal on all ranks, and state momentum_buffer of the optimizers is not")
    ]
    assert causes.of_copies(parameter, [state._replace(step=2)], [gradient]) == []
    assert causes.of_copies(_W, [state], [gradient]) == []
    assert causes.of_copies(parameter, [state], []) == []  # a sparse gradient is not observed
    assert causes.of_copies(parameter, [state, gradient], [gradient]) == []


def test_copies_of_another_size_than_that_of_one_rank_are_compared_with_nothing() -> None:
    wanted = {_W: torch.tensor([3.0, 4.0, 5.0, 6.0], dtype=torch.float64)}
    halves = observation(rank({_W: [3.0, 4.0]}), rank({_W: [5.0, 6.0]}))
    assert causes.of_replicas(_W, wanted, halves, _WITHIN) == []
    wholes = observation(rank({_W: [2.0, 4.0, 5.0, 6.0]}), rank({_W: [4.0, 4.0, 5.0, 6.0]}))
    assert [cause.word for cause in causes.of_replicas(_W, wanted, wholes, _WITHIN)] == ["not reduced"]


@pytest.mark.parametrize("added", [0.0, 1e-6])
def test_of_gradients_that_were_clipped_the_norm_says_how_large_they_were(added: float) -> None:
    scale = 4 * (5.0 + added) / (20.0 + added)
    scaled = {key: [number * scale for number in value] for key, value in _BASE.items()}
    whole = {**scaled, _NORM: [20.0]} if added else {_W: [2 * 3.0, 2 * 4.0], _B: [2 * 0.5, 2 * 0.25], _NORM: [20.0]}
    (cause,) = _told({**_BASE, _NORM: [5.0]}, whole, _W)
    assert cause.word == "factor"
    assert cause.text.startswith("the norm before clipping is 4 times that of one rank; gradients then are ")


def test_a_factor_close_to_1_is_shown_by_its_distance() -> None:
    assert [causes.times(1 + off) for off in (0.0, 1e-9, -2e-6, 0.5)] == ["1", "1 + 1e-09", "1 - 2e-06", "1.5"]


def test_sentences_are_about_the_base_where_that_is_no_single_rank() -> None:
    world = World(4, "differs", fact=Fact(0, "data", "as one rank has"), causes=(Cause("factor", "that of one rank"),))
    assert world.beside(1) is world
    other = world.beside(2)
    assert (other.fact and other.fact.text, other.causes[0]) == (
        "as the base has",
        Cause("factor", "that of the base"),
    )
