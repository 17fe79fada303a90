"""Of a model in few bits, what it computes in a wider dtype that it names: known where it is, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fsdpcheck.case import UserModelSpec
from fsdpcheck.errors import NotExact
from fsdpcheck.exact import surrogates
from fsdpcheck.exact.certifier import BFLOAT16, FLOAT32, Certifier
from fsdpcheck.exact.surrogates import spelled_out
from fsdpcheck.exact.surrogates.grids import WHOLE
from fsdpcheck.workload.user_model.dtype_widening import widened
from tests.common.tables import each

X = torch.tensor([[3.0, -1.0, 2.0, 1.0], [1.0, 2.0, -3.0, 2.0]], dtype=torch.float64)
OWN = UserModelSpec("model.py:build", "model.py:batch", names="float32")


def certified(function: Callable[[Tensor], Tensor], x: Tensor = X) -> tuple[Tensor, Certifier]:
    """What it gives in float64 where a model in bfloat16 runs it, and how far that may be off."""
    certifier = Certifier(BFLOAT16, "test", roundable=True, in_wider=FLOAT32)
    with surrogates.installed(WHOLE), certifier.casts_back(), certifier, widened(OWN, torch.float64):
        return function(x), certifier


def squares(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True) + 1e-6


UPCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: squares(x.float()),
    "to": lambda x: squares(x.to(torch.float32)),
    "to, named": lambda x: squares(x.to(dtype=torch.float32)),
    "type": lambda x: squares(x.type(torch.float32)),
    "of integers": lambda x: torch.arange(4).float() * 0.1,
    "made in it": lambda x: torch.arange(4, dtype=torch.float32) * 0.1,
    "like another in it": lambda x: squares(x.float()).to(x.float()),
    "on a device": lambda x: squares(x.float()).to(x.device).to("cpu"),
    "with a number": lambda x: squares(x.float()) * torch.full((), 3.0, dtype=x.dtype),
}
NARROW: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": squares,
    "with what is narrow": lambda x: squares(x.float() * x),
    "integers": lambda x: torch.arange(4).to(x.dtype) * 0.1,
    "cast back": lambda x: squares(x.float()).to(x.dtype),
    "cast back, named": lambda x: squares(x.float()).to(dtype=x.dtype),
    "cast back by type": lambda x: squares(x.float()).type(x.dtype),
    "cast back like another": lambda x: squares(x.float()).type_as(x),
    "cast back as another": lambda x: squares(x.float()).to(x),
    "cast back on a grid": lambda x: squares(x.float().to(x.dtype)),
    "a constant of few bits": lambda x: torch.tensor([0.1, 0.3], dtype=x.dtype).float() * 1.5,
    "cast back before": lambda x: squares((x.float() * 0.1).to(x.dtype)),
}


@each("name", UPCAST)
def test_what_is_made_in_the_wider_dtype_is_as_exact_as_that(name: str) -> None:
    found, certifier = certified(UPCAST[name])
    assert 0 < certifier._off.error(found) < 2.0**-16


@each("name", NARROW)
def test_what_is_cast_back_or_not_known_is_rounded_to_few_bits(name: str) -> None:
    """And within what is said: in bfloat16 it is off by so much at most."""
    found, certifier = certified(NARROW[name])
    error = certifier._off.error(found)
    assert error > 2.0**-8
    narrow = NARROW[name](X.bfloat16()).double()
    assert not torch.equal(narrow, found)
    assert bool(((narrow - found).abs() <= error * found.abs()).all())


def test_what_a_cast_back_gives_is_rounded_for_all_who_hold_it() -> None:
    """A cast that changes nothing gives its operand itself."""

    def both(x: Tensor) -> Tensor:
        wide = squares(x.float())
        wide.to(x.dtype)
        return wide

    found, certifier = certified(both)
    assert certifier._off.error(found) > 2.0**-8


def test_buffers_are_of_the_wider_dtype() -> None:
    buffer = torch.tensor([0.1, 0.01], dtype=torch.float64)
    certifier = Certifier(BFLOAT16, "test", roundable=True, in_wider=FLOAT32)
    certifier.is_in_wider([buffer])
    with surrogates.installed(WHOLE), certifier:
        assert certifier._off.error(buffer * 3) < 2.0**-16
        assert certifier._off.error(torch.tensor([0.1, 0.01], dtype=torch.float64) * 3) > 2.0**-8


def test_a_normalisation_in_the_wider_dtype_is_decided_where_few_bits_leave_it_open() -> None:
    """1 over the root of 3.25 is 0.555, and what is above 0.55 is 1."""
    values = torch.tensor([[1.0, 2.0, 2.0, -2.0]], dtype=torch.float64)

    def normalised(x: Tensor) -> Tensor:
        found: Tensor = spelled_out.over_root(x, squares(x))
        return found

    found, _ = certified(lambda x: normalised(x.float()), values)
    assert found.tolist() == [[1.0, 1.0, 1.0, -1.0]]
    with pytest.raises(NotExact, match="across a decision"):
        certified(normalised, values)


def test_integers_that_few_bits_cannot_hold_are_refused_but_in_the_wider_dtype() -> None:
    certified(lambda x: torch.tensor([257]).float())
    with pytest.raises(NotExact, match="needs 9 bits; had 8"):
        certified(lambda x: torch.tensor([257]).to(x.dtype))


def test_sums_on_a_grid_may_have_as_many_bits_as_the_wider_dtype() -> None:
    certified(lambda x: (x.float() * 257) @ x.float().T)
    with pytest.raises(NotExact, match="result of mul: needs 10 bits; had 8"):
        certified(lambda x: (x * 257) @ x.T)


def test_what_is_cast_back_fits_few_bits_on_a_grid_too() -> None:
    """Whatever takes it then: a softmax reads a value and not its bits."""
    certified(lambda x: (x.float() * 256).to(x.dtype).softmax(-1))
    with pytest.raises(NotExact, match="forward cast back: needs 10 bits; had 8"):
        certified(lambda x: (x.float() * 256 + 1).to(x.dtype).softmax(-1))


@each("mark", [spelled_out.SQUARES, spelled_out.TOTAL])
def test_a_root_or_a_total_that_is_cast_back_is_refused(mark: str) -> None:
    """Marks of a tensor stay where a cast changes nothing; on ranks it is another tensor, without them."""

    def cast(x: Tensor) -> Tensor:
        total = x.float().sum(-1, keepdim=True)
        setattr(total, mark, True)
        total.float()  # no copy on ranks either
        return total.to(x.dtype)

    with pytest.raises(NotExact, match="a root or a total is cast back before it is used"):
        certified(cast)
