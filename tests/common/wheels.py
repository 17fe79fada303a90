"""The wheel and the sdist, built without isolation, so that nothing is fetched; an environment that has the wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def copy(target: Path, *more: str) -> None:
    """What a build reads, and ``more`` of the checkout: a build leaves files behind, here in the copy."""
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("fsdpcheck", "impl", "properties", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", *more):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, target / name)


def build(what: str, source: Path, built: Path) -> None:
    """``what``: build_wheel or build_sdist."""
    command = [sys.executable, "-W", "ignore", "-c", _BUILD, what, str(built)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)


class Fresh:
    """An environment in ``folder`` that has the wheel, and the libraries of the one that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copy(folder / "source")
        build("build_wheel", folder / "source", folder)
        (wheel,) = folder.glob("*.whl")
        venv.create(folder / "env")
        self.bin = folder / "env" / "bin"
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet"]
        subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
        (installed,) = (folder / "env").glob("lib/python*/site-packages")
        libraries = [entry for entry in sys.path if Path(entry).is_absolute() and Path(entry).resolve() != ROOT]
        (installed / "libraries.pth").write_text("".join(f"{entry}\n" for entry in libraries))
        self.environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
        }

    def run(self, folder: Path, program: str, *words: str) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of a program of the environment."""
        done = subprocess.run(
            [str(self.bin / program), *words], cwd=folder, env=self.environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr
