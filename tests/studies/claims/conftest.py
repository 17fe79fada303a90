"""One lab for all rows, and what each row measures when nothing is broken, measured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fsdpcheck.studies.claims import registry
from fsdpcheck.studies.claims.lab import Lab
from fsdpcheck.studies.claims.registry import Outcome
from tests.studies.claims.ledger import ELSEWHERE, verdict, written


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.close()


@pytest.fixture(scope="session")
def measured(lab: Lab) -> Callable[[str], Outcome]:
    """A row measured now, whatever is broken."""

    def measure(id: str) -> Outcome:
        (row,) = registry.chosen([id])
        return row.check(lab)

    return measure


@pytest.fixture(scope="session")
def as_it_is(measured: Callable[[str], Outcome]) -> Callable[[str], Outcome]:
    """A row measured before anything is broken: to be called first in a test."""
    found: dict[str, Outcome] = {}

    def measure(id: str) -> Outcome:
        if id not in found:
            found[id] = measured(id)
        return found[id]

    return measure


@pytest.fixture(scope="session")
def verdict_before(as_it_is: Callable[[str], Outcome]) -> Callable[[str], str]:
    """A row's verdict when nothing is broken: the document's, which test_document.py compares with what is measured.

    Where the document was measured elsewhere, or is missing, the row is measured here.
    """

    def look_up(id: str) -> str:
        return verdict(written()[id]) if id in written() and id not in ELSEWHERE else as_it_is(id).verdict

    return look_up
