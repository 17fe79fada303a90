"""Where sessions of pytest run that tests start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fsdpcheck

HOME = os.environ.get("HOME", "")


@pytest.fixture
def place(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for one session, in the environment of all: where that differs, each test has a zygote of its own."""
    monkeypatch.setenv("PYTHONPATH", str(Path(fsdpcheck.__file__).parent.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HOME", HOME)
    for name in ("USERPROFILE", "PYTEST_DEBUG_TEMPROOT"):
        monkeypatch.delenv(name)
    return pytester
