"""Old names of modules: who still imports one is told the new one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from fsdpcheck import adapters
from fsdpcheck._moved import MOVED
from fsdpcheck.errors import AdapterError
from fsdpcheck.loading import references


def test_every_module_that_has_moved_is_told_with_its_place_of_today() -> None:
    assert len(MOVED) > 100
    for old, now in MOVED.items():
        if now.rpartition(".")[2] not in ("opacus", "_opacus_sampler", "triton_norms"):  # these need extras
            importlib.import_module(f"fsdpcheck.{now}")
        try:
            room = importlib.import_module(f"fsdpcheck.{old}")
        except ModuleNotFoundError as error:
            told = MOVED[str(error.name).removeprefix("fsdpcheck.")]  # of the folder, where that has moved as a whole
            assert str(error).endswith(f"it is fsdpcheck.{told} now")  # noqa: PT017 - or a folder of today
        else:
            assert room.__path__, f"{old} has not moved"


def test_an_old_name_in_an_adapter_or_a_reference_is_told_with_the_new_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from fsdpcheck.adapters._base import Features\n")
    with pytest.raises(AdapterError, match=r"adapters\._base': it is fsdpcheck\.adapter now") as raised:
        adapters.load(f"{file}:adapter")
    assert f"{file}:1: from fsdpcheck.adapters._base" in str(raised.value)
    with pytest.raises(AdapterError, match=r"it is fsdpcheck\.program\.probes\.observables now"):
        references.load("fsdpcheck.observers:padding", references.Kind("observer", AdapterError))
    with pytest.raises(ImportError, match=r"in fsdpcheck\.laws now"):
        from fsdpcheck.errors import Violation  # type: ignore[attr-defined]  # noqa: F401
