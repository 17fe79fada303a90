"""fsdpcheck: does a sharded, private training step compute exactly what one device would, and can it ever hang?

This module imports neither torch nor hypothesis: the pytest plugin loads it in every pytest run on the machine.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdpcheck.pytest_plugin.own_tests import LawsBroken as LawsBroken
    from fsdpcheck.pytest_plugin.own_tests import check as check
    from fsdpcheck.pytest_plugin.own_tests import parametrize_with_laws as parametrize_with_laws
    from fsdpcheck.pytest_plugin.ranks_agree import RanksDisagree as RanksDisagree
    from fsdpcheck.pytest_plugin.ranks_agree import assert_ranks_agree as assert_ranks_agree
    from fsdpcheck.simulation.search import Search as Search
    from fsdpcheck.simulation.search import search as search
    from fsdpcheck.simulation.simulate import Simulation as Simulation
    from fsdpcheck.simulation.simulate import SimulationFailed as SimulationFailed
    from fsdpcheck.simulation.simulate import simulate as simulate

__version__ = "0.1.0"

_HERE = Path(__file__).parent
_BESIDE = {"fsdpcheck.impl": _HERE.parent / "impl", "fsdpcheck.properties": _HERE.parent / "properties"}


class _BareCheckout(MetaPathFinder):
    """Finds ``fsdpcheck.impl`` and ``fsdpcheck.properties`` beside the package, as a wheel has them inside it.

    Exactly these two names, so that every source file has one module object (a fault planted in a second copy would
    be invisible in the first).
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        folder = _BESIDE.get(fullname)
        if folder is None or not (folder / "__init__.py").is_file():
            return None
        return importlib.util.spec_from_file_location(
            fullname, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


class _Moved(MetaPathFinder):
    """Finds no module that has moved: the error says where it is now. Asked last of all finders."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if not fullname.startswith("fsdpcheck."):
            return
        from fsdpcheck._moved import MOVED

        now = MOVED.get(fullname.removeprefix("fsdpcheck."))
        if now is not None:
            raise ModuleNotFoundError(f"No module named {fullname!r}: it is fsdpcheck.{now} now", name=fullname)


sys.meta_path += [_BareCheckout(), _Moved()]

_SIMULATE, _SEARCH, _AGREE = "simulation.simulate", "simulation.search", "pytest_plugin.ranks_agree"
_OWN_TESTS = "pytest_plugin.own_tests"
_IN = {
    **dict.fromkeys(("Simulation", "SimulationFailed", "simulate"), _SIMULATE),
    **dict.fromkeys(("Search", "search"), _SEARCH),
    **dict.fromkeys(("LawsBroken", "check", "parametrize_with_laws"), _OWN_TESTS),
    **dict.fromkeys(("RanksDisagree", "assert_ranks_agree"), _AGREE),
}


def __getattr__(name: str) -> object:
    """The public functions and what they give back or raise; those of simulation import torch."""
    if name in _IN:
        return getattr(importlib.import_module(f"fsdpcheck.{_IN[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
