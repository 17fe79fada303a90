"""One run of a public script in a fresh copy of its repository: on simulated ranks, or in real processes.

One that says "cuda" has its GPUs played on the CPU: by --cuda-as-cpu, and in processes by benchmarks/played.py.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import made_data, played

_HERE: Final = Path(__file__).parent
_SECONDS: Final = 540
"""After which a run is given up, and said to be."""
_START: Final = """
import importlib.util
spec = importlib.util.spec_from_file_location("fsdpcheck_played", {path!r})
played = importlib.util.module_from_spec(spec)
spec.loader.exec_module(played)
played.begin()
"""
"""How each Python process of a script begins; by its path, for repositories have a package "benchmarks" too."""
_ROOT: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ran:
    """What came of a script: its exit code (None: given up), seconds, what ranks printed and how it ended."""

    code: int | None
    seconds: float
    printed: str
    ending: str


def on_simulated_ranks(row: dict[str, Any], folder: Path) -> Ran:
    """``fsdpcheck simulate`` of a row of the list; ``folder`` has the repositories."""
    with _copy(row, folder) as place:
        told = place.top / "told.json"
        command = [sys.executable, "-m", "fsdpcheck", "simulate", "--json", str(told)]
        command += ["--cuda-as-cpu"] if row["cuda"] else []
        _, *words = shlex.split(row["line"])
        if row["line"].startswith("torchrun "):
            command += ["--torchrun", row["line"]]
        else:
            command += ["-n", str(row["ranks"]), words[0], "--", *words[1:]]
        done = _run(command, place, {})
        data = json.loads(told.read_text()) if told.is_file() else {}
        lines = "".join(rank["printed"] for rank in data.get("ranks", ()))
        text = (data.get("failure") or {}).get("text", "")
        return _ran(place, done[0], done[1], lines, text or done[2])


def in_processes(row: dict[str, Any], folder: Path) -> Ran:
    """In processes over gloo; where a rank starts, it is told what simulated ranks are told."""
    with _copy(row, folder) as place:
        (place.top / "start").mkdir()
        (place.top / "start" / "sitecustomize.py").write_text(_START.format(path=str(_HERE / "played.py")))
        first, *words = shlex.split(row["line"])
        variables = {played.DEVICES: str(row["ranks"]) if row["cuda"] else "0"}
        if first == "torchrun":
            log = ["--redirects", "3", "--log-dir", str(place.top / "log")]
            ranks = ["--nnodes=1", f"--nproc-per-node={row['ranks']}", f"--master-port={_free_port()}"]
            words = ["-m", "torch.distributed.run", *ranks, *log, *_script(words)]
        else:
            (place.top / "log").mkdir()
            variables[played.LOGS] = str(place.top / "log")
        code, seconds, said = _run([sys.executable, *words], place, variables, place.top / "start")
        logs = sorted((place.top / "log").rglob("std*.log"))
        lines = "".join(log.read_text(errors="replace") for log in logs)
        return _ran(place, code, seconds, lines, said or lines)


def _ran(place: _Place, code: int | None, seconds: float, lines: str, ending: str) -> Ran:
    """What came of it, without the folders of this machine; ``ending``: what tells how it ended."""
    named = {f"{place.folder}{os.sep}": "", str(place.top): "COPY", str(_ROOT): "FSDPCHECK", sys.prefix: "PREFIX"}
    named[sys.base_prefix] = "PREFIX"
    for folder in {entry for entry in sys.path if entry.endswith("site-packages")}:
        named[folder] = "site-packages"
    named[sysconfig.get_path("stdlib")] = "python"
    for folder, name in sorted(named.items(), key=lambda each: -len(each[0])):
        lines, ending = lines.replace(folder, name), ending.replace(folder, name)
    return Ran(code, seconds, lines, "" if code == 0 else ending[-2000:])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _script(words: list[str]) -> list[str]:
    """The script and its words of a line of torchrun, without its options."""
    start = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[start:]


@dataclass
class _Place:
    """A copy of a repository, where a script runs; removed at the end."""

    top: Path
    root: Path
    folder: Path
    python_path: tuple[str, ...]

    def __enter__(self) -> _Place:
        return self

    def __exit__(self, *raised: object) -> None:
        shutil.rmtree(self.top, ignore_errors=True)


def _copy(row: dict[str, Any], folder: Path) -> _Place:
    top = Path(tempfile.mkdtemp(prefix="script-"))
    root = top / "copy"
    shutil.copytree(folder / row["repository"], root, symlinks=True)
    inside = root / row["folder"]
    for name in row["data"]:
        made_data.MAKERS[name](inside)
    return _Place(top, root, inside, tuple(str(root / each) for each in row["python_path"]))


def _run(
    command: list[str], place: _Place, variables: dict[str, str], start: Path | None = None
) -> tuple[int | None, float, str]:
    """Exit code, seconds, and stdout and stderr as they came."""
    paths = [*([str(start)] if start else []), *place.python_path, str(_ROOT)]
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": str(place.folder),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=place.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=_SECONDS)
        return process.returncode, time.monotonic() - began, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        said, _ = process.communicate()
        return None, time.monotonic() - began, said
