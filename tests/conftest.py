"""What tests of several files share: simulated ranks, which take a moment to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fsdpcheck.engines.simulated import SimulatedEngine


@pytest.fixture(scope="module")
def engine() -> Iterator[SimulatedEngine]:
    """Simulated ranks, kept for the tests of one file."""
    engine = SimulatedEngine()
    yield engine
    engine.close()
