"""One slice runs: a process of its own, ended with all that it started, and the row that its end gives."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.night.record import ROOT, Row
from benchmarks.night.slices import FOLDER, Outcome, Slice

GUARD: Final = 7200.0
"""Wall seconds after which a slice counts as not ended: a machine that many share is slow, no slice is so slow."""
_KEPT: Final = 1000
"""Characters of the output of a slice that failed, at its end."""
_FROM_OUTSIDE: Final = {-number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)}


class EndedFromOutside(Exception):
    """A slice's process was ended by a signal that no mistake of its own raises; it says nothing of what it ran."""


def row_of(one: Slice, guard: float = GUARD) -> Row:
    """Run a slice. Whatever interrupts this ends its processes and gives no row. Raises EndedFromOutside."""
    processor, began = _processor(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="night-") as name:
        code, output = _run([each.replace(FOLDER, name) for each in one.command], Path(name), guard)
        if code in _FROM_OUTSIDE:
            raise EndedFromOutside(f"{signal.Signals(-code).name}, by somebody or for want of memory")
        outcome = _judged(one, Path(name), code, output)
    wall, spent = round(time.monotonic() - began, 1), round(_processor() - processor, 1)
    seconds = {item: round(share * spent, 1) for item, share in _shares(one.items, outcome.seconds).items()}
    counted = {what: getattr(outcome, what) for what in ("passed", "failed", "skipped", "cases")}
    row: Row = {"part": one.part, "tree": one.tree, "items": seconds, "seed": one.seed, **counted}
    row |= {"judged": dict(outcome.judged)} if outcome.judged else {}
    row |= {"findings": list(outcome.findings), "code": code, "processor": spent, "wall": wall}
    return row


def _shares(items: Sequence[str], seconds: Mapping[str, float]) -> dict[str, float]:
    """What part of a slice's processor time each item took: by the clock, which on a busy machine tells no more."""
    told = {item: seconds[item] for item in items if item in seconds}
    usual = sum(told.values()) / len(told) if told else 1.0
    each = {item: told.get(item, usual) for item in items}
    whole = sum(each.values())
    return {item: one / whole if whole else 1 / len(each) for item, one in each.items()}


def _judged(one: Slice, folder: Path, code: int | None, output: str) -> Outcome:
    """The outcome, where a code other than 0 without a finding is one, and so is an end that cannot be read."""
    try:
        outcome = one.read(folder, output, one)
    except (OSError, ValueError, KeyError) as error:
        outcome = Outcome(failed=1, findings=(f"{type(error).__name__}: {error}: ...{output[-_KEPT:]}",))
    if code == 0 or outcome.failed:
        return outcome
    end = "it did not end" if code is None else f"exit code {code}"
    return replace(outcome, passed=0, failed=1, findings=(f"{end}: ...{output[-_KEPT:]}",))


def _run(command: list[str], folder: Path, guard: float) -> tuple[int | None, str]:
    """Exit code (None: it did not end) and output, of which all is kept in the folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "TMPDIR": str(folder)}
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "cwd": ROOT, "env": environment, "start_new_session": True}
    file = folder / "output"
    with _termination_interrupts(), file.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, **options)
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            try:
                code = process.wait(guard)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, file.read_text(encoding="utf-8", errors="replace")


@contextmanager
def _termination_interrupts() -> Iterator[None]:
    """SIGTERM is Ctrl-C: what a slice started does not outlive the night."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _processor() -> float:
    """Processor seconds of all children that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime
