"""Runs PyTorch's own tests on ranks of each kind: ``python tests/torch_suite/runner.py --out FILE [NAME ...]``.

FILE gets a line for each test and kind; what it has already is not run again. At its end a table is printed. Needs
``expecttest``, as PyTorch's tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.torch_suite.results import KINDS, Line, Outcome, append, read, table

GUARD = 200.0
"""Seconds after which a test is ended: a protection of this runner, longer than any time-out of a test."""
SIZE = 4
_OTHER_SIZES = (("Skipped due to small world size", 8), (r"Test requires an exact world size of (\d+)", 0))


def run(out: Path, names: Sequence[str], kinds: Sequence[str], file: Path | None) -> None:
    """Each test on four ranks, and where it asks for another number, on so many."""
    _in_process(lambda: _run_on(SIZE, out, names, kinds, file))
    asked = [(_asked(line), line.test) for line in read(out) if line.size == SIZE and line.kind == kinds[0]]
    for size in sorted({size for size, _ in asked if size}):
        those = [test for wanted, test in asked if wanted == size and (not names or test in names)]
        if those:
            _in_process(lambda size=size, those=those: _run_on(size, out, those, kinds, file))


def _asked(line: Line) -> int:
    """The number of ranks that a test was skipped for the lack of, or 0."""
    for pattern, size in _OTHER_SIZES:
        if found := re.match(pattern, line.reason):
            return size or int(found[1])
    return 0


def _run_on(size: int, out: Path, names: Sequence[str], kinds: Sequence[str], file: Path | None) -> None:
    """In a process of its own: the tests read the number of ranks when they are imported."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), MASTER_PORT=port, OMP_NUM_THREADS="1")
    from tests.torch_suite import ranks, suite

    there = {(line.test, line.kind, line.size) for line in read(out)}
    for test, (kind_of_test, method) in suite.load(file).items():
        for kind in kinds:
            if (names and test not in names) or (test, kind, size) in there:
                continue
            began = time.monotonic()
            outcome, seconds = judged(lambda kind=kind, on=kind_of_test, method=method: ranks.RUNS[kind](on, method))
            wall = round(time.monotonic() - began, 2)
            append(out, Line(test, kind, size, outcome.status, outcome.reason, round(seconds, 2), wall))
            print(f"{test} on {size} {kind}: {outcome.status} {outcome.reason}"[:200], flush=True)


def judged(work: Callable[[], Outcome], guard: float = GUARD) -> tuple[Outcome, float]:
    """What ``work`` gives in a process of its own, and the processor seconds of it and of what it has waited for."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        _silence()
        _end(lambda: os.write(writing, json.dumps(vars(work())).encode()))
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(child, child)  # whichever of both comes first: it has a group before it can be ended by it
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], guard)
    told = os.read(reading, 1 << 16) if ready else b""
    os.close(reading)
    if told or not ready:
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has started
    seconds = usage.ru_utime + usage.ru_stime
    if told:
        return Outcome(**json.loads(told)), seconds
    if not ready:
        return Outcome("killed", f"it had not ended after {guard:g} seconds"), seconds
    code = os.waitstatus_to_exitcode(status)
    return Outcome("killed", f"its process ended by {signal.Signals(-code).name if code < 0 else code}"), seconds


def _in_process(work: Callable[[], object]) -> None:
    child = os.fork()
    if child == 0:
        _end(work)
    _, status = os.waitpid(child, 0)
    if status:
        sys.exit(f"the tests could not be run: {os.waitstatus_to_exitcode(status)}")


def _end(work: Callable[[], object]) -> None:
    """Do the work and end this process."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _silence() -> None:
    """What tests print goes nowhere, or to the file that TORCH_SUITE_OUTPUT names."""
    there = os.environ.get("TORCH_SUITE_OUTPUT", os.devnull)
    file = os.open(there, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    for stream in (0, 1, 2):
        os.dup2(file, stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of ranks (default: %(default)s)")
    parser.add_argument("--file", type=Path, help="a file of PyTorch's tests (default: those of its wheel)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests (default: all)")
    options = parser.parse_args()
    run(options.out, options.names, options.kinds.split(","), options.file and options.file.resolve())
    print(table(read(options.out)))


if __name__ == "__main__":
    main()
