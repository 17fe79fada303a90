"""Thirty public scripts, unmodified: on simulated ranks, and in real processes over gloo.

The list (public_scripts.json) was made before the first of them was run; the scripts themselves are no part of this
repository, and lie in a folder OWNER/NAME each. A script runs in a fresh copy of its repository. One that says "cuda"
has its GPUs played on the CPU, on simulated ranks by --cuda-as-cpu and in real processes by benchmarks/played.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import made_data, played

HERE: Final = Path(__file__).parent
LIST: Final = HERE / "public_scripts.json"
RESULTS: Final = HERE / "public_scripts.jsonl"
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


def lines(*names: str, folder: str = "") -> Iterator[str]:
    """[NAME ...] --in DIR: each script on simulated ranks and in processes, into public_scripts.jsonl; then a table."""
    if not folder:
        raise SystemExit("python -m benchmarks scripts --in DIR: where the repositories lie, DIR/OWNER/NAME")
    for row in json.loads(LIST.read_text(encoding="utf-8"))["scripts"]:
        if names and row["name"] not in names:
            continue
        yield f"{row['name']}: {row['line']}"
        simulated, real = _simulated(row, Path(folder)), _real(row, Path(folder))
        found = _result(row, simulated, real)
        with RESULTS.open("a", encoding="utf-8") as out:
            out.write(json.dumps(found) + "\n")
        yield "  " + _told(found)
    yield from table()


def table() -> Iterator[str]:
    """The newest result of each script."""
    newest = {found["name"]: found for found in map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())}
    rows = [newest[row["name"]] for row in json.loads(LIST.read_text())["scripts"] if row["name"] in newest]
    yield "| script | ranks | simulated | s | processes | s | printed lines that are equal |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        one, other = row["simulated"], row["real"]
        yield (
            f"| {row['name']} | {row['ranks']} | {one['outcome']} | {one['seconds']} | {other['outcome']} "
            f"| {other['seconds']} | {row['equal']} |"
        )
    yield f"{sum(row['simulated']['outcome'] == 'runs' for row in rows)} of {len(rows)} run on simulated ranks"


def _simulated(row: dict[str, Any], folder: Path) -> Ran:
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
        printed = "".join(rank["printed"] for rank in data.get("ranks", ()))
        text = (data.get("failure") or {}).get("text", "")
        return Ran(done[0], done[1], printed, (text or done[2])[-2000:] if done[0] else "")


def _real(row: dict[str, Any], folder: Path) -> Ran:
    """In processes; where a rank starts, it is told what simulated ranks are told."""
    with _copy(row, folder) as place:
        (place.top / "start").mkdir()
        (place.top / "start" / "sitecustomize.py").write_text(_START.format(path=str(HERE / "played.py")))
        first, *words = shlex.split(row["line"])
        if first == "torchrun":
            log = ["--redirects", "3", "--log-dir", str(place.top / "log")]
            words = ["--nnodes=1", f"--nproc-per-node={row['ranks']}", "--master-port=29533", *log, *_script(words)]
            words = ["-m", "torch.distributed.run", *words]
        devices = str(row["ranks"]) if row["cuda"] else "0"
        code, seconds, said = _run([sys.executable, *words], place, {played.DEVICES: devices}, place.top / "start")
        logs = sorted((place.top / "log").rglob("std*.log"))
        printed = "".join(log.read_text(errors="replace") for log in logs) if logs else said
        return Ran(code, seconds, printed, said[-2000:] if code else "")


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


def _result(row: dict[str, Any], simulated: Ran, real: Ran) -> dict[str, Any]:
    same, all_lines = _equal_lines(simulated.printed, real.printed)
    return {
        "name": row["name"],
        "ranks": row["ranks"],
        "simulated": {
            "outcome": _outcome(simulated),
            "seconds": round(simulated.seconds, 1),
            "ending": simulated.ending,
        },
        "real": {"outcome": _outcome(real), "seconds": round(real.seconds, 1), "ending": real.ending},
        "equal": f"{same} of {all_lines}",
        "differ": _differing(simulated.printed, real.printed),
    }


def _outcome(ran: Ran) -> str:
    if ran.code is None:
        return "given up"
    return "runs" if ran.code == 0 else f"code {ran.code}"


_VARYING: Final = re.compile(
    r"0x[0-9a-f]+|script-\w+|\[\d{3,}\]|'MASTER_PORT': '\d+'|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}"
    r"|\d+/\d+/\d+ \d+:\d+:\d+ [AP]M|\d{4}-?\d\d-?\d\d[-T ][\d:.,]+|\"time\": \d+"
    r"|(Time|Data|Rate):? *[\d.]+(s,\s+[\d.]+/s)?\s*\([^)]*\)|[\d.]+ ?(ms|seconds|GBps|img per sec)\b|speed: [\d.]+"
)
"""What no two runs have in common: addresses, temporary folders, numbers of processes and ports, times, speeds."""


def _lines_of(text: str) -> list[str]:
    return sorted(_VARYING.sub("#", line.strip()) for line in text.splitlines() if line.strip())


def _equal_lines(one: str, other: str) -> tuple[int, int]:
    """How many lines both have printed, in whatever order, and how many there are."""
    mine, theirs = _lines_of(one), _lines_of(other)
    left = list(theirs)
    same = 0
    for line in mine:
        if line in left:
            left.remove(line)
            same += 1
    return same, max(len(mine), len(theirs))


def _differing(one: str, other: str) -> list[list[str]]:
    """The first lines that only one of the two has printed."""
    mine, theirs = _lines_of(one), _lines_of(other)
    only = [line for line in mine if line not in theirs], [line for line in theirs if line not in mine]
    return [[line[:200] for line in lines[:8]] for lines in only]


def _told(found: dict[str, Any]) -> str:
    one, other = found["simulated"], found["real"]
    sides = (
        f"{name}: {side['outcome']} {side['seconds']} s" for name, side in (("simulated", one), ("processes", other))
    )
    return f"{'; '.join(sides)}; equal: {found['equal']}"
