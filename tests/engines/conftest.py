"""One simulator for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.simulation.simulator import Simulator


@pytest.fixture(scope="module")
def simulate() -> Iterator[Simulator]:
    simulator = Simulator()
    yield simulator
    simulator.engine.close()
