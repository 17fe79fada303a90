"""Sessions on implementations that misbehave: each must end, be green only where nothing was wrong, and leave nothing.

``python -m benchmarks sessions [MINUTES [FILE]] [--shard K/N]``: runs ``fsdpcheck run`` on simulated ranks and on
processes, and pytest, on what misbehaving.py names, W = 2, and keeps a row a session in FILE (JSON lines). It begins no
session after MINUTES (default 10) and goes on with what FILE lacks; shard K of N takes each N-th. A session has
``LIMIT`` seconds of processor time or sleep a run (FSDPCHECK_LIMIT_SECONDS); one that has not ended after ``GUARD``
seconds is ended from outside and counts as not ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks import misbehaving
from benchmarks.kept import Kept
from fsdpcheck.processes import leftovers

RECORD: Final = Path(__file__).parent / "sessions.jsonl"
WAYS: Final = ("simulated", "processes", "pytest")
LIMIT, GUARD = 12, 400
_ENDING: Final = 5.0
"""How long what helped a session (servers of multiprocessing) may take to see that it is over."""
_FILE: Final = Path(misbehaving.__file__)
_MARK: Final = "FSDPCHECK_BENCHMARK"


def lines(minutes: int = 10, file: str = str(RECORD), shard: tuple[int, int] = (1, 1)) -> Iterator[str]:
    """A line for each session that did not end, left something or was green in error; then the table of ``file``."""
    kept, began = Kept(file, "what", "way"), time.monotonic()
    for what, way in everything()[shard[0] - 1 :: shard[1]]:
        if time.monotonic() - began > 60 * minutes:
            break
        if (what, way) not in kept:
            kept.add(session(what, way))
            if words := wrong(kept.rows[-1]):
                yield f"WRONG {what} {way}: {words}; {kept.rows[-1]}"
    yield from table(kept.rows)


def everything() -> list[tuple[str, str]]:
    """(what, way in) of every session, spread so that each part has all ways."""
    named = [f"{name}_on_{who}" for who in ("one", "first", "all") for name in misbehaving.ACTIONS]
    named += [f"{name}_at_load" for name in misbehaving.AT_LOAD]
    return [(what, way) for what in named for way in WAYS]


def session(what: str, way: str) -> dict[str, Any]:
    """Run one session in a folder of its own; its row."""
    folder, shared = Path(tempfile.mkdtemp(prefix="sessions-")), _shared_memory()
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    environment = {
        **os.environ,
        **{_MARK: mark, "TMPDIR": str(folder), "FSDPCHECK_LIMIT_SECONDS": str(LIMIT), "OMP_NUM_THREADS": "1"},
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
    began = time.monotonic()
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(
            _command(what, way, folder), stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=folder, env=environment
        )
    try:
        code: int | None = process.wait(GUARD)
    except subprocess.TimeoutExpired:
        code = None
        process.kill()
        process.wait()
    row = {"what": what, "way": way, "code": code, "seconds": round(time.monotonic() - began, 1)}
    left = _left(mark)
    row |= {"processes": len(left), "shared memory": len(_shared_memory() - shared)}
    row["json"] = way == "pytest" or (folder / "report.json").exists()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ours = {"out", "report.json", "report.json.journal"}
    row["folders"] = sum(path.name not in ours and path.name.startswith("fsdpcheck") for path in folder.iterdir())
    row["said"] = (folder / "out").read_bytes()[-2000:].decode(errors="replace") if wrong(row) else ""
    shutil.rmtree(folder, ignore_errors=True)
    return row


def wrong(row: dict[str, Any]) -> str:
    """What of a row is not as it should be; "" when all is."""
    said = ["did not end"] * (row["code"] is None)
    said += [f"left {row[what]} {what}" for what in ("processes", "folders") if row[what]]
    said += ["wrote no JSON"] * (not row["json"])
    names = {row["what"], row["what"].partition("_on_")[0]}
    said += ["green"] * (row["code"] == 0 and not names & misbehaving.HARMLESS)
    return ", ".join(said)


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: exit code and seconds of each misbehaviour by way in, and what must be 0."""
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row["what"].partition("_on_")[0]][row["way"]].append(f"{row['code']} ({row['seconds']:.0f} s)")
    yield f"| misbehaviour | {' | '.join(WAYS)} |"
    yield f"|---|{'---|' * len(WAYS)}"
    for what, by_way in cells.items():
        yield f"| {what} | {' | '.join(', '.join(by_way[way]) for way in WAYS)} |"
    yield ""
    ended = [row for row in rows if row["code"] is not None]
    left = sum(row["processes"] + row["folders"] for row in rows)
    green = sum("green" in wrong(row) for row in rows)
    without = sum(not row["json"] for row in rows)
    yield (
        f"{len(rows)} sessions: {len(rows) - len(ended)} did not end, {left} processes and folders were left behind,"
        f" {green} were green in error, {without} wrote no JSON"
    )


def _command(what: str, way: str, folder: Path) -> list[str]:
    adapter = f"{_FILE}:{what}"
    if way == "pytest":
        plugin = ["-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder)]
        chosen = ["--pyargs", "fsdpcheck.properties.test_training", "-k", "plain_training_is_the_single_device_one"]
        named = ["--fsdpcheck-adapter", adapter, "--fsdpcheck-world-size", "2"]
        return [sys.executable, "-m", "pytest", "-q", *plugin, *chosen, *named]
    run = ["run", "--adapter", adapter, "--law", "training.plain", "--world-size", "2", "--engine", way, "-j1"]
    return [sys.executable, "-m", "fsdpcheck", *run, "--json", str(folder / "report.json")]


def _left(mark: str) -> list[int]:
    """Processes of the session that live on, and not only for the moment that a process takes to end."""
    sought, until = f"{_MARK}={mark}\0".encode(), time.monotonic() + _ENDING
    while left := [entry.pid for entry in leftovers.living() if sought in leftovers.environment(entry.pid)]:
        if time.monotonic() > until:
            break
        time.sleep(_ENDING / 100)
    return left


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.exists() else set()
