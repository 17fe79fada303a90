"""PyTorch's own tests of torch.distributed: those that ship in its wheel, or those of a file of its repository.

They are unmodified. Their decorators read BACKEND and WORLD_SIZE when they are imported, so a process has them for one
number of ranks.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from pathlib import Path
from typing import Any

from torch.testing._internal.common_distributed import MultiProcessTestCase, MultiThreadedTestCase

Tests = dict[str, tuple[type[Any], str]]
"""By name, a class and the name of its method."""


def load(file: Path | None) -> Tests:
    """The tests of a file, or those of the wheel, in the order of their names."""
    if file is None:
        from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

        kind = type("OfTheWheel", (TestDistBackend, DistributedTest._DistTestBase), {})
        return {name: (kind, name) for name in _methods(kind)}
    module = _imported(file)
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and kind.__module__ == module.__name__]
    return {
        f"{file.stem}.{kind.__name__}.{name}": (kind, name)
        for kind in kinds
        if issubclass(kind, MultiProcessTestCase | MultiThreadedTestCase)
        for name in _methods(kind)
    }


def _methods(kind: type[Any]) -> list[str]:
    return [name for name in unittest.TestLoader().getTestCaseNames(kind)]


def _imported(file: Path) -> Any:
    """A file of ``test/distributed`` or a folder in it, where tests import their neighbours by path."""
    sys.path[:0] = [str(folder) for folder in (file.parent, *list(file.parents)[1:4])]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
