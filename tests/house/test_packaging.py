"""Packaging: what the wheel holds, one module object for each source file, and what a plugin must not import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import defaultdict
from pathlib import Path

import pytest

import fsdpcheck
from tests.common import wheels

HERE = Path(__file__).parents[2]
SOURCES = Path(fsdpcheck.__file__).parent
IN_CHECKOUT = (HERE / "pyproject.toml").is_file()
checkout = pytest.mark.skipif(not IN_CHECKOUT, reason="needs the files of the checkout")


def _declared() -> set[str]:
    return set(tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])


def _folders() -> set[str]:
    """Every folder with Python files that belongs to the package, by its canonical name."""
    found = set()
    for folder, name in (
        ("fsdpcheck", "fsdpcheck"),
        ("impl", "fsdpcheck.impl"),
        ("properties", "fsdpcheck.properties"),
    ):
        top = HERE / folder
        for path in top.rglob("*.py"):
            found.add(".".join([name, *path.parent.relative_to(top).parts]))
    return found


@checkout
def test_every_folder_with_python_files_is_listed() -> None:
    assert _declared() == _folders()


@checkout
def test_every_listed_folder_has_an_init() -> None:
    for name in _declared():
        assert importlib.import_module(name).__file__ is not None, f"{name} has no __init__.py"


@checkout
def test_the_entry_point_is_named_like_its_module() -> None:
    points = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert points == {"fsdpcheck.pytest_plugin": "fsdpcheck.pytest_plugin"}
    assert "fsdpcheck.pytest_plugin" in (HERE / "conftest.py").read_text()


@checkout
def test_the_source_distribution_has_what_its_tests_need() -> None:
    manifest = (HERE / "MANIFEST.in").read_text()
    for name in ("conftest.py", "tox.ini", "constraints.txt", "graft tests", "graft impl", "graft properties"):
        assert name in manifest


@checkout
def test_the_version_is_written_once_in_meaning() -> None:
    project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
    assert project["version"] == fsdpcheck.__version__


@checkout
@pytest.mark.parametrize("name", ["impl", "properties"])
def test_a_second_copy_of_the_code_cannot_be_imported(name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import {name}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert f"fsdpcheck.{name}" in result.stderr


NEED_EXTRAS = (
    *("accelerate", "_deepspeed", "deepspeed", "lightning_fabric", "_opacus", "opacus", "opacus_ddp"),
    *("_opacus_sampler", "torchtitan"),
    "triton_norms",
)


def test_each_source_file_has_one_module() -> None:
    """After whatever ran before in this process: importing all of it makes no second copy."""
    for path in SOURCES.rglob("*.py"):
        parts = path.relative_to(SOURCES.parent).with_suffix("").parts
        if parts[-1] not in ("__main__", *NEED_EXTRAS):
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    modules = defaultdict(set)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        inside = file is not None and any(
            Path(file).is_relative_to(top) for top in (SOURCES, HERE / "impl", HERE / "properties")
        )
        if inside:
            modules[file].add((name, id(module)))
    assert modules
    assert {file: found for file, found in modules.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    "module",
    [
        "fsdpcheck",
        "fsdpcheck.pytest_plugin",
        "fsdpcheck.cli",
        "fsdpcheck.session.supervisor",
        "fsdpcheck.session.ledger",
        "fsdpcheck.report.document",
    ],
)
def test_what_must_be_light_imports_neither_torch_nor_hypothesis(module: str) -> None:
    code = f"import {module}, sys; print([name for name in ('torch', 'hypothesis', 'numpy') if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert result.stdout.strip() == "[]"


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """A working folder in which another fsdpcheck lies, as a checkout lies where an installed one is run."""
    (tmp_path / "fsdpcheck").mkdir()
    (tmp_path / "fsdpcheck" / "__init__.py").write_text("raise RuntimeError('the copy in the working folder')")
    return tmp_path


_ON_PROCESSES = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
if __name__ == "__main__":
    from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
    from fsdpcheck.engines import open_engine
    from fsdpcheck.judging.check import check_case
    from fsdpcheck.judging.registry import chapters
    from fsdpcheck.judging.run import Run
    engine = open_engine(sys.argv[1])
    case = TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(2), BatchLayout("contiguous", 2))
    print(check_case(chapters()["training.plain"], Run(engine, "fully_shard"), case, diagnose=False).status)
    engine.close()
"""


_SUPERVISED = [
    *("-P", "-m", "fsdpcheck", "run", "--adapter", "fully_shard", "--law", "training.plain", "--profile", "quick"),
    *("--world-size", "2", "--engine"),
]


@pytest.mark.parametrize("engine", [pytest.param("simulated", marks=pytest.mark.nightly), "processes"])
@pytest.mark.parametrize(
    "command", [pytest.param(_SUPERVISED, id="run"), pytest.param(["-c", _ON_PROCESSES], marks=pytest.mark.nightly)]
)
def test_the_processes_of_a_run_use_the_copy_that_started_them(decoy: Path, command: list[str], engine: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *command, engine], cwd=decoy, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "holds" in result.stdout


@checkout
def test_the_wheel_holds_only_fsdpcheck(tmp_path: Path) -> None:
    """Built without isolation, from a copy of the sources, so that nothing is fetched and nothing is left behind."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    wheels.copy(source)
    wheels.build("build_wheel", source, tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"fsdpcheck", f"fsdpcheck-{fsdpcheck.__version__}.dist-info"}
    for wanted in (
        "impl/__init__.py",
        "impl/norms/__init__.py",
        "properties/__init__.py",
        "py.typed",
        "cli/__init__.py",
        "cli/templates/workflow.txt",
        "report/schema.json",
        "report/page/page.html.jinja",
        "report/page/parts.html.jinja",
        "report/page/page.css",
        "report/page/page.js",
    ):
        assert f"fsdpcheck/{wanted}" in names
    assert any("LICENSE" in name for name in names)


@checkout
@pytest.mark.nightly
def test_what_is_released_judges_from_an_empty_folder(tmp_path: Path) -> None:
    """The wheel that is made of the sdist judges, installed beside nothing else of this project, and has its files."""
    for needed in ("setuptools", "pip"):
        pytest.importorskip(needed)
    source, built, installed, empty = (tmp_path / name for name in ("source", "built", "installed", "empty"))
    for folder in (built, empty):
        folder.mkdir()
    wheels.copy(source, *("tests", "conftest.py", "tox.ini", "constraints.txt", "CHANGELOG.md"))
    wheels.build("build_sdist", source, built)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "tests" / "conftest.py").is_file()
    wheels.build("build_wheel", unpacked, built)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    assert {path.name for path in installed.iterdir()} - {"bin"} == {
        "fsdpcheck",
        f"fsdpcheck-{fsdpcheck.__version__}.dist-info",
    }
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    for words, said in (
        (["-c", "import fsdpcheck; print(fsdpcheck.__file__)"], str(installed)),
        (["-m", "fsdpcheck", "init", "ddp"], "fsdpcheck_adapter.py: written"),
        (["-m", "fsdpcheck", "gate", "--update", "--law", "lifecycle.loss", "--html", "page.html"], "commit it"),
    ):
        done = subprocess.run([sys.executable, *words], cwd=empty, env=environment, capture_output=True, text=True)
        assert (done.returncode, said in done.stdout) == (0, True), done.stdout + done.stderr
