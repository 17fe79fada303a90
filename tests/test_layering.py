"""Imports point down only: the ways in > uses of a run > runner, checks > engines, oracle, strategies > data > case."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdpcheck

ROOT = Path(fsdpcheck.__file__).parent
IMPL = Path(__import__("fsdpcheck.impl", fromlist=["impl"]).__file__).parent

FLOORS: tuple[dict[str, tuple[str, ...]], ...] = (
    {
        "words": (
            "fsdpcheck", "errors", "suspects", "trace", "values", "exact", "exact.*", "exact.surrogates.*",
            "binomial", "torch_private", "hypothesis_private", "triton_private", "references", "spelling", "leftovers",
            "provenance", "reading", "excerpt",
            "process_state", "process_state.*",
        )
    },
    {"case": ("case", "case.*")},
    {
        "data": (
            "execution", "arithmetic", "matching", "deadlock", "adapter", "adapters", "adapters._base",
            "adapters._contract",
            "adapters._plugs", "models", "losses", "layers", "layouts", "siblings", "neighbours", "plan", "verdict",
            "floors", "coverage", "clipping_groups", "refusals", "program", "program.*", "own", "own.model",
            "own.units", "own.inspection", "own.alone", "own.separate", "own.widening",
        )
    },
    {
        "adapters": ("adapters.*",),
        "engines": ("engines", "engines.*"),
        "oracle": ("oracle", "proof", "low_precision", "whole_step", "tiers"),
        "observers": ("observers", "watchers"),
        "strategies": ("strategies", "strategies.*", "own.drawing"),
    },
    {
        "runner": ("runner",),
        "checks": ("checks", "checks.*", "own.roundings", "diagnosis", "diagnosis.*"),
    },
    {
        "uses": (
            "replay", "census", "evidence", "uninitialised", "undetermined", "check", "judging", "law", "planted",
            "session", "agenda", "ledger", "power", "power.*", "claims", "claims.*",
        )
    },
    {"report": ("report", "report.*")},
    {
        "ways in": (
            "power.command", "claims.command", "report.command", "cli", "__main__", "pytest_plugin", "supervise",
            "children", "worker", "under_torchrun", "guard",
        )
    },
)  # fmt: skip
"""From the bottom up. On one floor, a room may use its own modules and no other room's."""


def _modules() -> dict[str, Path]:
    """Every module of fsdpcheck by its name without the prefix."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in ("impl", "properties"):
            found[".".join(parts).removesuffix(".__init__").replace("__init__", "fsdpcheck")] = path
    return found


def _place(module: str) -> tuple[int, str]:
    """(floor, room) of a module; an exact name goes before a folder."""
    rooms = [(number, room, names) for number, floor in enumerate(FLOORS) for room, names in floor.items()]
    for wanted in (module, f"{module.rpartition('.')[0]}.*"):
        for number, room, names in rooms:
            if wanted in names:
                return number, room
    pytest.fail(f"fsdpcheck.{module} has no room yet: name it in FLOORS of {__file__}")


def _imported(path: Path) -> Iterator[str]:
    """Every module that a file imports when it runs, at the top or inside a function, as an absolute dotted name."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)


def _known(dotted: str, modules: dict[str, Path]) -> str | None:
    """The module of fsdpcheck that "fsdpcheck.case.Case" or "fsdpcheck.case" is about."""
    name = dotted.removeprefix("fsdpcheck.")
    if dotted.split(".")[0] != "fsdpcheck" or name.split(".")[0] in ("impl", "properties"):
        return None
    return name if name in modules else name.rpartition(".")[0] or "fsdpcheck"


def _upward(module: str, modules: dict[str, Path]) -> Iterator[str]:
    """Imports of a module that do not point down, in words."""
    floor, room = _place(module)
    for dotted in _imported(modules[module]):
        used = _known(dotted, modules)
        if used is not None and used != module:
            used_floor, used_room = _place(used)
            if used_floor >= floor and used_room != room:
                yield f"fsdpcheck.{module} ({room}, floor {floor}) imports {used} ({used_room}, floor {used_floor})"


def test_imports_point_down() -> None:
    modules = _modules()
    assert len(modules) > 100
    assert [found for module in sorted(modules) for found in _upward(module, modules)] == []


def test_an_import_that_points_up_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "deadlock.py"
    wrong.write_text("def late():\n    from fsdpcheck.session import run_session\n")
    assert list(_upward("deadlock", {**_modules(), "deadlock": wrong})) == [
        "fsdpcheck.deadlock (data, floor 2) imports session (uses, floor 5)"
    ]


def test_impl_never_imports_fsdpcheck() -> None:
    paths = sorted(IMPL.rglob("*.py"))
    assert len(paths) > 50
    forbidden = ("fsdpcheck", "impl")
    assert [(path.name, name) for path in paths for name in _imported(path) if name.split(".")[0] in forbidden] == []


def test_impl_is_reached_only_by_its_adapters_and_by_name() -> None:
    users = {
        module
        for module, path in _modules().items()
        if any(f"{name}.".startswith("fsdpcheck.impl.") for name in _imported(path))
    }
    of_impl = {"reference", "reference_fsdp2", "_reference_samplers", "_reference_kernels"}
    assert users == {f"adapters.{name}" for name in of_impl}


def test_the_reference_adapter_reaches_impl_lazily() -> None:
    tree = ast.parse(_modules()["adapters.reference"].read_text(encoding="utf-8"))
    at_the_top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [module for module in at_the_top if module and module.startswith("fsdpcheck.impl")]
