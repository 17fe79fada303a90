"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsdpcheck

TOYS = Path(__file__).parents[1] / "toys"
TOY, LAWS = f"{TOYS / 'unsharded.py'}:adapter", str(TOYS / "laws.py")
"""A toy implementation, and laws for it: ("--adapter", TOY, "--laws", LAWS)."""

_SOURCES = str(Path(fsdpcheck.__file__).parent.parent)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _SOURCES, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fsdpcheck", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(folder, *arguments)
    out, err = process.communicate()
    return process.returncode, out, err
