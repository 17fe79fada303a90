"""Flight-Recorder dumps of real gloo ranks, and what two analysers say of them: torch's own, and fsdpcheck's.

Each rank writes its dump when its program ends, or from a thread when it has not ended after some seconds, as NCCL's
watchdog does; gloo has none. A rank whose process is lost leaves no dump.
"""

from __future__ import annotations

import ast
import io
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components.fr_logger import FlightRecorderLogger

from benchmarks.communication import real
from benchmarks.communication.pairs import PROGRAMS, Pair, without_prefixes
from benchmarks.communication.real import Outcome
from fsdpcheck.report import colour
from fsdpcheck.report import trace as report
from fsdpcheck.traces import checking, reading

PREFIX: Final = "trace_rank_"
SECONDS: Final = 8.0
"""After how long a rank that has not ended writes its dump."""
_GRACE_SECONDS: Final = 2.0
_CHARACTERS: Final = 4000
_ENVIRONMENT: Final = {"TORCH_FR_BUFFER_SIZE": "2000"}

_AS_WRITTEN: Final = "as written"
_FILLED_IN: Final = "filled in"

Analyser = Callable[[Path], str]
"""Says what is wrong in a folder of dumps, "" for nothing; raises if it cannot read them."""


def said(pair: Pair, faulty: bool) -> dict[str, Outcome]:
    """What each of ANALYSERS says of the dumps of one run of the pair.

    "completed": it found nothing. "reported": it found what the text says. "raised": it could not read the dumps.
    """
    with TemporaryDirectory() as folder:
        began = time.monotonic()
        write(pair, faulty, Path(folder))
        spent = time.monotonic() - began
        return {name: _said(analyser, Path(folder, which), spent) for name, (analyser, which) in ANALYSERS.items()}


def write(pair: Pair, faulty: bool, folder: Path) -> None:
    """Run the pair on gloo and have each rank that lives long enough write its dump into folders of the folder.

    "as written": what gloo's recorder holds. "filled in": the same with the members of each group, which it lacks.
    """
    for which in (_AS_WRITTEN, _FILLED_IN):
        Path(folder, which).mkdir()
    until = SECONDS + _GRACE_SECONDS
    real.run(pair, faulty, until, _ENVIRONMENT, around=lambda rank: _dumped(rank, folder), grace_seconds=until)


@contextmanager
def _dumped(rank: int, folder: Path) -> Iterator[None]:
    """Write the dump of this process when the block ends, or after SECONDS."""
    ended, groups, destroy = threading.Event(), _Groups(), dist.destroy_process_group

    def destroyed(*args: Any, **options: Any) -> None:
        groups.look()
        destroy(*args, **options)

    def dump() -> None:
        ended.wait(SECONDS)
        groups.look()
        written = torch._C._distributed_c10d._dump_fr_trace()
        (folder / _AS_WRITTEN / f"{PREFIX}{rank}").write_bytes(written)
        filled_in = pickle.loads(written) | {"pg_config": groups.known}
        (folder / _FILLED_IN / f"{PREFIX}{rank}").write_bytes(pickle.dumps(filled_in))

    dist.destroy_process_group = destroyed
    thread = threading.Thread(target=dump, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class _Groups:
    """The groups of this rank by name, as NCCL's recorder writes them."""

    def __init__(self) -> None:
        self.known: dict[str, dict[str, str]] = {}

    def look(self) -> None:
        """Add those that there are now."""
        world = distributed_c10d._world
        for group, members in list(world.pg_group_ranks.items()):
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                continue
            name = world.pg_names[group]
            self.known[name] = {"name": name, "desc": group.group_desc, "ranks": str(sorted(members))}


def _said(analyser: Analyser, folder: Path, spent: float) -> Outcome:
    """In a process of its own: torch's analyser leaves garbage collection off."""
    heard = real.collected({(0,): lambda say: real.tell(0, lambda: analyser(folder), say)}, 60.0)
    text = heard.text.removeprefix("rank 0: ") if heard.kind != "completed" else ast.literal_eval(heard.text)
    kind = "reported" if heard.kind == "completed" and text else heard.kind
    text = without_prefixes(text.replace(f"{folder.parent}{os.sep}", ""))
    return Outcome(kind, text[:_CHARACTERS], round(spent + heard.seconds, 2))


def by_torch(folder: Path) -> str:
    """What ``torchfrtrace`` logs, and of a folder that lacks ranks what it logs with --allow-incomplete-ranks."""
    FlightRecorderLogger()
    logged = io.StringIO()
    logging.getLogger("Flight Recorder").addHandler(logging.StreamHandler(logged))
    asked = [str(folder), "--prefix", PREFIX]
    try:
        fr_trace.main(asked)
    except AssertionError as error:
        if "Missing dump files" not in str(error):
            raise
        logged.write(f"{error}\n")
        fr_trace.main([*asked, "--allow-incomplete-ranks"])
    return "".join(line for line in logged.getvalue().splitlines(keepends=True) if not _elsewhere(line))


def _elsewhere(line: str) -> bool:
    """Whether the line is a frame outside of the program."""
    return re.search(r" at \S.*:\d+$", line) is not None and str(PROGRAMS) not in line


def by_fsdpcheck(folder: Path) -> str:
    """What ``fsdpcheck trace check`` prints of a finding."""
    job = reading.read([folder])
    checked = report.Checked([folder], job, checking.finding(job))
    return report.ending(checked, colour.painter(io.StringIO())) if checked.failure is not None else ""


ANALYSERS: Final[dict[str, tuple[Analyser, str]]] = {
    "torchfrtrace on dumps of gloo": (by_torch, _AS_WRITTEN),
    "torchfrtrace, groups filled in": (by_torch, _FILLED_IN),
    "fsdpcheck on dumps of gloo": (by_fsdpcheck, _AS_WRITTEN),
    "fsdpcheck, groups filled in": (by_fsdpcheck, _FILLED_IN),
}
"""Name -> the analyser, and the folder that it reads."""
