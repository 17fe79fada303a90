"""What tests of several files share: simulated ranks, which take a moment to start; and which rows run by day."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from tests.common import by_day


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    """Simulated ranks, kept for the tests of one file."""
    engine = SimulatedEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ranks_here() -> Iterator[InProcessEngine]:
    """The same in this process, for tests that change what ranks run."""
    engine = InProcessEngine()
    yield engine
    engine.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of long tests some rows by day, and all by night."""
    by_day.by_night(items)
