"""Decisions: what noise explains agrees, what it does not differs, what it hides is not decided."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fsdpcheck.comparison.decision import COARSEST, Decision, Noise, decided, noise_of
from fsdpcheck.comparison.record import Key
from fsdpcheck.comparison.rounding_bound import factor

EPS = 2.0**-52
G, W, TINY = Key(0, "gradient", "w"), Key(0, "parameter", "w"), Key(0, "gradient", "bias")


def _one(values: dict[Key, list[float]]) -> dict[Key, Tensor]:
    return {key: torch.tensor(those, dtype=torch.float64) for key, those in values.items()}


def _decide(base: dict[Key, list[float]], run: dict[Key, list[float]], noise: Noise) -> list[Decision]:
    return decided(_one(base), _one(run), noise, EPS, 1e-6, lambda key: True)


def test_equal_bits_agree_whatever_the_noise() -> None:
    found = _decide({W: [1.0, 2.0]}, {W: [1.0, 2.0]}, Noise({W: 1.0}, 1))
    assert [(decision.says, decision.why) for decision in found] == [("agrees", "equal bits")]


@pytest.mark.parametrize(("times", "says"), [(0.99, "agrees"), (1.01, "differs")])
def test_the_threshold_is_noise_times_the_factor(times: float, says: str) -> None:
    noise = Noise({W: 2.0**-40}, 8)
    apart = times * 2.0**-40 * factor(8, 2, 1, 1e-6)
    assert [decision.says for decision in _decide({W: [1.0, 0.0]}, {W: [1.0, apart]}, noise)] == [says]


def test_a_result_is_rounded_once_though_no_noisy_run_moves_it() -> None:
    one_rounding = {W: [1.0 + EPS]}
    assert _decide({W: [1.0]}, one_rounding, Noise({}, 8))[0].says == "agrees"


def test_noise_that_hides_what_a_float32_would_show_leaves_it_undecided() -> None:
    found = _decide({W: [1.0]}, {W: [1.0 + 1e-9]}, Noise({W: COARSEST}, 8))
    assert found[0].says == "undecidable"
    assert found[0].resolution > COARSEST


def test_a_gradient_that_is_zero_but_for_rounding_agrees_beside_one_that_is_not() -> None:
    found = {
        each.key: each
        for each in _decide({G: [1.0], TINY: [1e-17]}, {G: [1.0], TINY: [-3e-17]}, Noise({TINY: 1e-17}, 8))
    }
    assert (found[TINY].says, found[TINY].why) == ("agrees", "zero but for rounding")
    assert found[TINY].resolution < COARSEST, "beside the other, by which it is decided"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_only_one_run_has_differs(value: float) -> None:
    assert _decide({W: [1.0]}, {W: [value]}, Noise({W: 1.0}, 8))[0].says == "differs"
    assert _decide({W: [value]}, {W: [value]}, Noise({}, 8))[0].says == "agrees"


def test_an_observable_that_is_missing_differs_but_for_a_gradient_of_zeros() -> None:
    assert _decide({W: [1.0]}, {}, Noise({}, 8))[0].says == "differs"
    assert _decide({G: [0.0]}, {}, Noise({}, 8))[0].says == "agrees"
    assert _decide({G: [1.0]}, {}, Noise({}, 8))[0].says == "differs"


def test_noise_is_the_largest_of_all_runs_and_worlds_and_its_number_the_smallest() -> None:
    clean = _one({W: [1.0]})
    noise = noise_of(
        (clean, [_one({W: [1.25]}), _one({W: [0.5]})]), (clean, [_one({W: [1.0]}), _one({W: [2.0]}), _one({W: [1.0]})])
    )
    assert noise == Noise({W: 1.0}, 2)


def test_observables_stand_in_the_order_in_which_a_step_makes_them() -> None:
    keys = [Key(0, kind, "w") for kind in ("initial parameter", "gradient", "norm", "parameter", "state exp_avg")]
    later = Key(1, "gradient", "w")
    values = {key: [1.0] for key in (later, *reversed(keys))}
    assert [decision.key for decision in _decide(values, values, Noise({}, 1))] == [*keys, later]
