"""The house: which room stands on which floor. A room imports from lower floors and from itself, and nothing else."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import networkx
import pytest

import fsdpcheck

ROOT = Path(fsdpcheck.__file__).parent
IMPL = Path(__import__("fsdpcheck.impl", fromlist=["impl"]).__file__).parent
PICTURE = Path(__file__).parents[2] / "docs" / "architecture.md"

FLOORS: dict[str, int] = {
    "cli": 11, "pytest_plugin": 11,
    "report": 10,
    "session": 9, "studies": 9,
    "judging": 8, "laws": 9,
    "checks": 7,
    "comparison": 6, "diagnosis": 6, "engines": 6, "traces": 6,
    "oracle": 5, "program": 5, "simulation": 5, "strategies": 5,
    "adapter": 4, "execution": 4, "findings": 4, "workload": 4,
    "adapters": 3,
    "loading": 2,
    "case": 1, "exact": 1, "process_state": 1, "processes": 1,
    "compat": 0, "errors": 0,
}  # fmt: skip
"""Room (a folder or a file of fsdpcheck/) -> its floor."""


def _room(module: str) -> str:
    """The room of a module named without the prefix. ``python -m fsdpcheck`` is a door of the command line."""
    room = module.partition(".")[0].replace("__main__", "cli")
    if room not in FLOORS:
        pytest.fail(f"fsdpcheck.{module} stands in no room: give {room} a floor in FLOORS of {__file__}")
    return room


def _modules() -> dict[str, Path]:
    """Every module of fsdpcheck that stands in a room, by its name without the prefix."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] not in ("impl", "properties", "__init__", "_moved"):
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@functools.cache
def _imported(path: Path) -> tuple[str, ...]:
    """Every module that a file imports when it runs, at the top or inside a function, as an absolute dotted name."""
    found: list[str] = []
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            pending += ast.iter_child_nodes(node)
    return tuple(found)


def _used(module: str, modules: dict[str, Path]) -> set[str]:
    """The other modules of fsdpcheck in rooms that a module imports."""
    names = {
        dotted.removeprefix("fsdpcheck.") for dotted in _imported(modules[module]) if dotted.startswith("fsdpcheck.")
    }
    found = {name if name in modules else name.rpartition(".")[0] for name in names}
    return {name for name in found if name in modules} - {module}


def _upward(module: str, modules: dict[str, Path]) -> Iterator[str]:
    """Imports of a module that do not point down, in words."""
    room = _room(module)
    for used in sorted(_used(module, modules)):
        below = _room(used)
        if below != room and FLOORS[below] >= FLOORS[room]:
            yield f"fsdpcheck.{module} ({room}, {FLOORS[room]}) imports {used} ({below}, {FLOORS[below]})"


def test_imports_point_down() -> None:
    modules = _modules()
    assert len(modules) > 100
    assert [found for module in sorted(modules) for found in _upward(module, modules)] == []
    assert {_room(module) for module in modules} == set(FLOORS)


DOORS = {"adapter": 4, "laws": 9}
"""The faces for authors of adapters and of laws, files of names alone; every room is a folder."""


def test_the_house_has_at_most_twelve_floors_and_twenty_six_rooms_beside_two_doors() -> None:
    assert sorted(set(FLOORS.values())) == list(range(12))
    rooms = [room for room in FLOORS if (ROOT / room).is_dir()]
    assert len(rooms) <= 26
    assert {room: FLOORS[room] for room in FLOORS if room not in rooms} == DOORS


@pytest.mark.parametrize("door", DOORS)
def test_behind_a_door_there_is_nothing_but_names(door: str) -> None:
    _, *names = ast.parse((ROOT / f"{door}.py").read_text(encoding="utf-8")).body
    assert {type(one) for one in names} == {ast.ImportFrom, ast.Assign}


def test_no_modules_import_one_another_in_a_circle() -> None:
    modules = _modules()
    arrows = networkx.DiGraph((module, used) for module in modules for used in _used(module, modules))
    assert [sorted(circle) for circle in networkx.strongly_connected_components(arrows) if len(circle) > 1] == []


def test_an_import_that_points_up_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "deadlock.py"
    wrong.write_text("def late():\n    from fsdpcheck.session.run import run_session\n")
    assert list(_upward("execution.deadlock", {**_modules(), "execution.deadlock": wrong})) == [
        "fsdpcheck.execution.deadlock (execution, 4) imports session.run (session, 9)"
    ]


@pytest.mark.skipif(not PICTURE.is_file(), reason="needs the documents of the checkout")
def test_the_picture_shows_the_house() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", PICTURE.read_text(encoding="utf-8"), re.MULTILINE)
    drawn = {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)}
    assert drawn == FLOORS


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
    assert users == {f"adapters.builtin.{name}" for name in of_impl}


def test_the_reference_adapter_reaches_impl_lazily() -> None:
    tree = ast.parse(_modules()["adapters.builtin.reference"].read_text(encoding="utf-8"))
    at_the_top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not [module for module in at_the_top if module and module.startswith("fsdpcheck.impl")]


PARTICIPLES = re.compile(r"(?:^|_)(?:\w+ed|drawn|kept|made|seen|shown|stood|here|alone|unfit|unusual|wider)$|^of_")
"""What a module says of a thing without naming it."""
KINDS_OF_RANKS = {"engines.simulated", "engines._simulated"}
"""Names that tokens and options have had from the beginning."""
NAMES_OF_PACKAGES = {"adapters.builtin._deepspeed", "adapters.builtin.deepspeed"}


def test_modules_are_named_by_their_subjects() -> None:
    named = {module for module in _modules() if PARTICIPLES.search(module.rpartition(".")[2])}
    assert named == (KINDS_OF_RANKS | NAMES_OF_PACKAGES) & set(_modules())
    for wrong in ("covered", "groups_made", "here", "layers_seen", "of_spaces"):
        assert PARTICIPLES.search(wrong)
