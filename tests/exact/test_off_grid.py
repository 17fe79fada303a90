"""Values off every grid: bounded for what rounding may do to them, and refused wherever a difference could stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.certifier import FLOAT32, Certifier
from fsdpcheck.exact.off_grid import OffGrid
from fsdpcheck.exact.surrogates import spelled_out
from tests.common.tables import each

FREQUENCIES = (10000.0 ** (-torch.arange(0, 8, 2) / 8)).double()
X = torch.randint(-9, 10, (5, 6), generator=torch.Generator().manual_seed(0)).double()


def statistics(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


def angles(x: Tensor) -> Tensor:
    return torch.arange(5, dtype=x.dtype).unsqueeze(1) * FREQUENCIES.to(x.dtype)


LEAVING: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics of a norm": statistics,
    "angles": angles,
    "angles by a product of matrices": lambda x: torch.arange(5, dtype=x.dtype).unsqueeze(1) @ FREQUENCIES.to(x)[None],
    "a power": lambda x: 1.0 / (10000.0 ** (torch.arange(0, 6, 2, dtype=x.dtype) / 6)),
    "a division": lambda x: (x.abs() + 1) / 3.0,
}


def tracked(function: Callable[[Tensor], Tensor], x: Tensor = X) -> tuple[Tensor, Certifier]:
    with Certifier(FLOAT32, "test", roundable=True) as certifier:
        return function(x), certifier


@each("name", LEAVING)
def test_float32_is_within_the_error_that_is_said(name: str) -> None:
    found, certifier = tracked(LEAVING[name])
    error = certifier._off.error(found)
    assert 0 < error < 1e-5
    narrow = LEAVING[name](X.float()).double()
    assert not torch.equal(narrow, found)
    assert bool(((narrow - found).abs() <= error * found.abs()).all())
    with pytest.raises(NotExact):
        certifier.on_grid(found)


@each("name", LEAVING)
def test_without_leave_they_are_refused_at_once(name: str) -> None:
    with pytest.raises(NotExact), Certifier(FLOAT32, "test"):
        LEAVING[name](X)


STAYING: dict[str, Callable[[Tensor], object]] = {
    "a product with values": lambda x: (x * statistics(x)) @ x.T,
    "both signs added up": lambda x: (x * 0.1).sum(),
    "both signs added": lambda x: statistics(x) + x[:, :1] * 0.1,
    "a difference": lambda x: statistics(x) - 1,
    "a difference as a sum": lambda x: torch.add(statistics(x), statistics(x), alpha=-1),
    "a rounded quotient": lambda x: torch.div(statistics(x), 2.0, rounding_mode="floor"),
    "a comparison": lambda x: statistics(x) > 3.5,
    "a number for Python": lambda x: statistics(x)[0].item(),
    "an integer": lambda x: statistics(x).long(),
    "a maximum": lambda x: statistics(x).amax(),
    "a written place": lambda x: torch.zeros_like(x[:, :1]).copy_(statistics(x)),
    "a place of another": lambda x: statistics(x).mul_(2),
    "another surrogate": lambda x: statistics(x).softmax(-1),
    "what may underflow": lambda x: statistics(x) * 1e-40,
}


@each("name", STAYING)
def test_what_could_stay_different_is_refused_with_what_began_it(name: str) -> None:
    with surrogates.installed(), pytest.raises(NotExact, match=r"needs \d+ bits|no power of two"):
        tracked(STAYING[name])


def test_no_gradient_takes_such_a_value() -> None:
    found, certifier = tracked(statistics)
    certifier.stage = "backward"
    with certifier, pytest.raises(NotExact, match="backward mul takes what it gives"):
        torch.mul(found, 2.0)


@pytest.mark.parametrize("stands_for", ["inverse_root", "root", "over_root", "cosine", "sine"])
def test_a_surrogate_takes_what_is_decided_and_refuses_what_rounding_decides(stands_for: str) -> None:
    """The same value, known to 24 bits and to 8: the second may lie on either side."""
    decision = {
        "inverse_root": 1 / 0.6250002**2, "root": 1 / 0.6250002**2, "over_root": 1 / 0.2750002**2,
        "cosine": float(torch.acos(torch.tensor(0.2750004, dtype=torch.float64))),
        "sine": float(torch.asin(torch.tensor(0.2750004, dtype=torch.float64))),
    }[stands_for]  # fmt: skip
    operator, own = getattr(spelled_out, stands_for), (torch.ones(1).double(),) if stands_for == "over_root" else ()
    value = torch.tensor([decision], dtype=torch.float64)
    with surrogates.installed():
        with Certifier(FLOAT32, "test", roundable=True):
            operator(*own, value * 1.01)
        coarse = Certifier(FLOAT32, "test", roundable=True)
        coarse._off = OffGrid(20)
        with coarse, pytest.raises(NotExact, match="across a decision"):
            operator(*own, value)


def test_views_of_it_are_such_values_and_copies_of_others_are_not() -> None:
    found, certifier = tracked(lambda x: statistics(x).expand(5, 6).transpose(0, 1))
    with pytest.raises(NotExact):
        certifier.on_grid(found)
    certifier.on_grid(X)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float64).min, torch.finfo(torch.bfloat16).min, -torch.inf])
def test_what_masks_scores_stands_for_nothing_in_a_users_model(lowest: float) -> None:
    """The lowest number as well as -inf, added or filled in, in place too; and other numbers are as they were."""
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    added = torch.full((3, 3), lowest, dtype=torch.float64).triu(1)
    scores = X[:3, :3]
    ways = (
        lambda: scores.masked_fill(later, lowest),
        lambda: scores + added,
        lambda: scores.clone().masked_fill_(later, lowest),
        lambda: scores + torch.zeros_like(later, dtype=scores.dtype).masked_fill_(later, lowest),
    )
    for mask in ways:
        with surrogates.installed(), Certifier(FLOAT32, "test", roundable=True) as certifier:
            masked = torch.softmax(mask(), -1)
        assert not masked[later].any()
        assert masked[~later].any()
        assert certifier.used["forward _softmax"] < 24


def test_it_stands_for_itself_in_a_product_and_in_a_model_of_fsdpchecks() -> None:
    lowest = torch.full((2, 2), torch.finfo(torch.float64).min, dtype=torch.float64)
    with pytest.raises(NotExact, match="multiplies what masks"):
        tracked(lambda x: lowest @ x, X[:2, :2])
    with pytest.raises(NotExact, match="needs 1024 bits; had 24"), Certifier(FLOAT32, "test"):
        lowest + X[:2, :2]


def test_corners_and_the_identity_are_on_the_grid() -> None:
    found, _ = tracked(lambda x: torch.eye(3, 4, dtype=torch.float64) + x.tril() - x.triu(), X[:3, :4])
    assert torch.equal(found, torch.eye(3, 4).double() + X[:3, :4].tril() - X[:3, :4].triu())
