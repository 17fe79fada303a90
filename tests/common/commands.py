"""The command line and pytest: as functions of this process or of one that has torch imported, and as programs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Final

import fsdpcheck
from fsdpcheck import cli
from fsdpcheck.processes import zygote

TOYS = Path(__file__).parents[1] / "toys"
TOY, LAWS = f"{TOYS / 'unsharded.py'}:adapter", str(TOYS / "laws.py")
"""A toy implementation, and laws for it: ("--adapter", TOY, "--laws", LAWS)."""

_SOURCES = str(Path(fsdpcheck.__file__).parent.parent)
_PYTEST: Final = """import os, sys
for standard in (1, 2):
    os.dup2(int(sys.argv.pop(1)), standard)
from fsdpcheck.processes import fork_server, zygote
zygote.fork()
fork_server.fork()
import pytest
sys.exit(pytest.main(sys.argv[1:]))"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _SOURCES, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command as a program."""
    command = [sys.executable, "-m", "fsdpcheck", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True)


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of the command, its main function called here: no torch is imported again."""
    with chdir(folder), _file() as out, _file() as err:
        with _standard(out, err):
            try:
                code: object = cli.main(arguments)
            except SystemExit as end:
                code = end.code
        assert isinstance(code, int)
        return code, _text(out), _text(err)


def run_pytest(folder: Path, arguments: Sequence[str]) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of pytest in a process of its own that has torch imported, and nothing else."""
    with chdir(folder), _file() as out, _file() as err:
        files = [out.fileno(), err.fileno()]
        code = zygote.start(_PYTEST, [*map(str, files), *arguments], files, f"{os.getpid()}.pytest").wait()
        return code, _text(out), _text(err)


def _file() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8")


def _text(file: IO[str]) -> str:
    file.flush()
    file.seek(0)
    return file.read()


@contextmanager
def _standard(out: IO[str], err: IO[str]) -> Iterator[None]:
    """What this process and those that it starts print goes there."""
    kept = os.dup(1), os.dup(2)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            yield
            out.flush()
            err.flush()
    finally:
        for standard, file in enumerate(kept, 1):
            os.dup2(file, standard)
            os.close(file)
