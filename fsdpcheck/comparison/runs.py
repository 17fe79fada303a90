"""A script on W ranks in one arithmetic, observed, in a process of its own; several such runs, a few at a time."""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Final, NoReturn

import torch

from fsdpcheck.comparison.command_line import CommandLine
from fsdpcheck.comparison.observation.observer import Observer
from fsdpcheck.comparison.observation.script import ObservedScript
from fsdpcheck.comparison.precision import exactness
from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic
from fsdpcheck.comparison.record import Choice, Observation, RankRecord
from fsdpcheck.compat import multiprocessing_private
from fsdpcheck.errors import HOLDS, INTERNAL, FsdpcheckError, UsageError
from fsdpcheck.execution import Failure
from fsdpcheck.processes import leftovers, messages, zygote
from fsdpcheck.processes.zygote import Process
from fsdpcheck.simulation.current_rank import require_rank
from fsdpcheck.simulation.globals import system
from fsdpcheck.simulation.programs.script import Runnable, Script
from fsdpcheck.simulation.simulate import Options, simulate_script

_REQUEST: Final = "request"
_ANSWER: Final = "answer"
_TRACEBACK: Final = "traceback"
_ERRORS: Final = "stderr"
_LAST_WORDS: Final = 4
"""Lines."""
_BOOT: Final = f"""import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from {__name__} import serve
serve(sys.argv[1])"""


@dataclass(frozen=True)
class Run:
    """What is run. ``entropy``: what stands for the system's random numbers, of a script that seeds nothing.

    ``parts``: whether each rank's own parts of gradients are kept as well.
    """

    world_size: int
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    entropy: int = 0
    parts: bool = False

    def __str__(self) -> str:
        noise = "" if self.arithmetic.noise is None else f", noise {self.arithmetic.noise}"
        precision = "float64" if self.arithmetic.precision == "float64" else "its own precision"
        precision += "" if self.arithmetic.batch_statistics else " by running averages"
        parts = ", parts of gradients" * self.parts
        return f"{self.world_size} rank{'s' * (self.world_size > 1)} in {precision}{noise}{parts}"


@dataclass(frozen=True)
class Draws:
    """Random numbers. ``exact``: each has few bits. ``seed``: with what each process begins, if the user says one."""

    exact: bool = False
    seed: int | None = None


NOTHING_SAID: Final = Draws()


@dataclass(frozen=True)
class _InArithmetic:
    """A script whose ranks compute in one arithmetic. ``notes`` of that and ``choices`` are by rank.

    ``exact``: whether its draws have few bits. ``ended``: by rank, where what it computes is no longer proved exact.
    """

    script: Runnable
    arithmetic: Arithmetic
    exact: bool
    notes: dict[int, Counter[str]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    choices: dict[int, list[Choice]] = field(default_factory=dict)

    def main(self, rank: int) -> ModuleType:
        """The module that a rank runs it in."""
        return self.script.main(rank)

    def run(self) -> None:
        """Run it on the rank that this is."""
        rank = require_rank()
        with exactness.of_rank(rank) if self.exact else nullcontext() as held:
            notes = self.notes.setdefault(rank, Counter())
            with in_arithmetic(self.arithmetic, notes, rank, held) as choices:
                self.choices[rank] = [] if choices is None else choices.made
                self.script.run()
            self.ended[rank] = held.ended if held is not None else ""


def observed(script: Script, run: Run, options: Options, draws: Draws) -> Observation:
    """One run of the script, in this process, which it changes: see ``each_observed``."""
    if draws.seed is None:
        system.first += run.entropy
    else:
        system.first, system.alike = draws.seed, True
    observer, computing = Observer(parts=run.parts), _InArithmetic(script, run.arithmetic, draws.exact)
    with observer.installed(), installed(), exactness.where_ranks_meet() if draws.exact else nullcontext():
        done = simulate_script(ObservedScript(computing, observer), run.world_size, options)
    ranks = tuple(observer.records.get(rank, RankRecord()) for rank in range(run.world_size))
    for rank, notes in computing.notes.items():
        ranks[rank].notes.update(notes)
        ranks[rank].ended = computing.ended.get(rank, "")
        ranks[rank].choices = computing.choices[rank]
    return Observation(run.world_size, ranks, done.traces, _with_last_words(done.failure, done.printed), done.printed)


def _with_last_words(failure: Failure | None, printed: Sequence[str]) -> Failure | None:
    """Where a rank has left by sys.exit, with what it printed last, which says why: it raised nothing."""
    if failure is None or failure.kind != "exited":
        return failure
    words = next((printed[state.rank].rstrip() for state in failure.ranks if state.state.startswith("exited")), "")
    last = _last_lines(words)
    return replace(failure, text="\n".join([failure.text, *last])) if last else failure


def _last_lines(words: str) -> list[str]:
    """What was printed last, for a report; nothing where nothing was."""
    last = [f"    {line}" for line in words.splitlines()[-_LAST_WORDS:]]
    return ["  it printed last", *last] if last else []


def _told(place: Path) -> str:
    """What a process of a run that has ended wrote to stderr."""
    path = place / _ERRORS
    return path.read_text(errors="replace") if path.exists() else ""


def each_observed(
    line: CommandLine, runs: Iterable[Run], options: Options, jobs: int, draws: Draws = NOTHING_SAID
) -> Iterator[tuple[Run, Observation]]:
    """Each run with what was observed of it, as they end, ``jobs`` at a time.

    Each runs in a process and a folder of its own. What ends that process is the failure of its run. Raises an error of
    ours that a process has raised, and ends the others.
    """
    waiting, running = deque(runs), dict[int, tuple[Process, Run, Path]]()
    with tempfile.TemporaryDirectory(prefix="fsdpcheck-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.popleft()
                    place = Path(folder) / str(len(waiting))
                    place.mkdir()
                    process = _started(line, run, options, place, draws)
                    running[process.pid] = process, run, place
                pid, status = _one_that_ends(running)
                process, run, place = running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                yield run, _ended(run, place, status)
                shutil.rmtree(place, ignore_errors=True)
        finally:
            for process, _, _ in running.values():
                process.kill()
                process.wait()


def _one_that_ends(running: Collection[int]) -> tuple[int, int]:
    """The first of these processes to end, and how it ended; the first of all where a system tells no more."""
    if not hasattr(os, "pidfd_open"):
        return os.waitpid(next(iter(running)), 0)
    with ExitStack() as stack, selectors.DefaultSelector() as ends:
        for pid in running:
            handle = os.pidfd_open(pid)
            stack.callback(os.close, handle)
            ends.register(handle, selectors.EVENT_READ, pid)
        return os.waitpid(ends.select()[0][0].data, 0)


def _started(line: CommandLine, run: Run, options: Options, place: Path, draws: Draws) -> Process:
    if not _may_be_forked():
        (place / _REQUEST).write_bytes(messages.dumps((line, run, options, draws)))
        mark = os.environ.get(leftovers.MARK, str(os.getpid()))
        return zygote.start(_BOOT, [str(place), json.dumps(sys.path)], [], mark)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # the collector of the child would write to each page that is shared
    pid = os.fork()
    if pid == 0:
        _work(line, run, options, draws, place)
    gc.unfreeze()
    return zygote.Forked(pid)


def _may_be_forked() -> bool:
    """Whether what this process has done is no matter to one that is forked from it: not where there is a GPU.

    There torch starts a thread for it with the first backward, and refuses one in each process that is forked after
    that; and CUDA can be used in no process that is forked from one that has as much as asked for it.
    """
    return not torch.accelerator.is_available()


def serve(place: str) -> NoReturn:
    """The whole life of a process that was not forked from whoever wants the run that is described there."""
    line, run, options, draws = messages.loads((Path(place) / _REQUEST).read_bytes())
    _work(line, run, options, draws, Path(place))


def _work(line: CommandLine, run: Run, options: Options, draws: Draws, place: Path) -> NoReturn:
    """Run the script that is found here, leave the answer beside the run's folder, end this process."""
    code = INTERNAL
    try:
        multiprocessing_private.forget_what_the_parent_has()
        _silence(place)
        answer = place / _ANSWER
        before = set(sys.modules)
        try:
            script = line.at(run.world_size)  # before the folder changes, so that its files are known by their paths
            with in_linked_folder(place / "folder"):
                found: object = observed(script, run, options, draws)
        except UsageError as error:
            found = str(error)
        answer.write_bytes(messages.dumps((found, _of_torch(set(sys.modules) - before))))
        multiprocessing_private.end_servers()
        code = HOLDS
    except BaseException:
        (place / _TRACEBACK).write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _silence(place: Path) -> None:
    """What programs that the script starts print, and torch's loggers, goes nowhere, as what its ranks print does: it
    would come each run. What is written to stderr is kept while the run lasts, for a process that dies of something.
    """
    for descriptor, file in ((1, os.devnull), (2, str(place / _ERRORS))):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)


def _ended(run: Run, place: Path, status: int) -> Observation:
    """What the process of a run left. Raises UsageError that it raised, and FsdpcheckError for an error of ours."""
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        head = f"lost: the process of the ranks was killed by {name}\n  where   {run}"
        lost = Failure("lost", "\n".join([head, *_last_lines(_told(place))]))
        return Observation(run.world_size, (), (), lost)
    if not (place / _ANSWER).exists():
        text = (place / _TRACEBACK).read_text() if (place / _TRACEBACK).exists() else f"it ended by code {status >> 8}"
        raise FsdpcheckError(f"the process of a run ended without an answer\n  where   {run}\n{text}")
    found, imported = messages.loads((place / _ANSWER).read_bytes())
    for name in imported:  # so that the next fork has it already
        with suppress(Exception):
            importlib.import_module(name)
    if isinstance(found, str):
        raise UsageError(found)
    assert isinstance(found, Observation)
    return found


def _of_torch(modules: Iterable[str]) -> list[str]:
    """Those of them that are torch's, which imports much of itself only when it is used."""
    return sorted(name for name in modules if name.partition(".")[0] == "torch")


@contextmanager
def in_linked_folder(folder: Path) -> Iterator[None]:
    """While open, the working folder is a new one that has links to all that this one has.

    So a script finds its data, and a file that one run writes is not what the next run reads.
    """
    here = Path.cwd()
    folder.mkdir()
    for entry in here.iterdir():
        (folder / entry.name).symlink_to(entry)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
