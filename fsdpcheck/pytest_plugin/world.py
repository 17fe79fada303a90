"""The fixture ``world``: a function as W ranks in a user's own tests, on simulated ranks or on real ones.

It imports torch when a test first runs something, and not before.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import pytest

from fsdpcheck.engines._common import metal
from fsdpcheck.errors import UsageError, explain

if TYPE_CHECKING:
    from fsdpcheck.simulation.simulate import Simulation

Kind = Literal["simulated", "processes", "simulated-cuda", "gloo-cuda", "nccl"]
"""See engines/_common/metal.py."""
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
OPTION, INI, TIMEOUT = "--fsdpcheck-world", "fsdpcheck_world", "fsdpcheck_world_timeout"


class SharedByRanks(UserWarning):
    """Simulated ranks share something that real ranks have a copy of each, and one of them wrote to it."""


class World:
    """Ranks for tests. ``kind``: which, as the session was asked for; ``on`` gives others.

    | kind             | ranks                             | speak over | tensors on           |
    |------------------|-----------------------------------|------------|----------------------|
    | "simulated"      | threads, one running at a time    | memory     | the processors       |
    | "processes"      | processes, forked                 | gloo       | the processors       |
    | "simulated-cuda" | threads, on a stream each         | memory     | one GPU              |
    | "gloo-cuda"      | processes, forked                 | gloo       | GPUs, shared by them |
    | "nccl"           | processes, forked                 | NCCL       | a GPU each           |

    A test is skipped, with the reason, where the machine has no such ranks.
    """

    def __init__(self, kind: Kind, seconds: float, runs: Counter[str] | None = None) -> None:
        self.kind, self._seconds = kind, seconds
        self._simulation: Simulation | None = None
        self._runs = Counter[str]() if runs is None else runs

    def on(self, kind: Kind) -> World:
        """Ranks of this kind, whatever the session was asked for. Raises UsageError for a kind that there is not."""
        return World(_kind(kind), self._seconds, self._runs)

    @property
    def device(self) -> metal.Device:
        """Where a rank puts its tensors. Ranks with a GPU each say ``torch.cuda.set_device(LOCAL_RANK)`` themselves."""
        return metal.of(self.kind).device

    def run(self, program: Callable[..., Any], world_size: int, /, *args: Any, **kwargs: Any) -> list[Any]:
        """What ``program(*args, **kwargs)`` returns on each of ``world_size`` ranks, in their order.

        Each rank has the environment of torchrun; ``init_process_group`` is the program's own. What ranks print is
        printed, "[rank 2] " before each line. Simulated ranks share ``program`` and its arguments; a SharedByRanks
        warning names what one of them wrote to. Real ranks are forked from this process, and what they return is
        pickled.

        Guarantee: if it returns, every rank came to its end. The test fails with the report of ``fsdpcheck simulate``
        for a hang, a mismatch, a rank that raises, and whatever else simulated ranks find, under the one order of ranks
        that was run; on real ranks, for what gloo shows of that.
        Raises UsageError for a world size that is none.
        """
        if lacks := metal.of(self.kind).lacks(world_size):
            pytest.skip(f"no {self.kind} ranks: {lacks}")
        self._runs[self.kind] += 1
        place = _called(program, world_size, self.kind, sys._getframe(1))
        if not metal.is_simulated(self.kind):
            return self._on_processes(program, world_size, args, kwargs, place)
        return self._simulated(program, world_size, args, kwargs, place)

    @property
    def simulation(self) -> Simulation:
        """All that came of the last ``run``, of a failed one too. Raises UsageError where nothing was simulated."""
        if self._simulation is None:
            then = "ask after a run on simulated ranks; real ones have none"
            raise UsageError(explain("nothing was simulated", got=f"a world on {self.kind}", then=then))
        return self._simulation

    def _simulated(self, program: Any, world_size: int, args: Any, kwargs: Any, place: str) -> list[Any]:
        from fsdpcheck.report import colour
        from fsdpcheck.report import simulation as report
        from fsdpcheck.simulation.search import Search
        from fsdpcheck.simulation.simulate import Options, simulated

        options = Options(on_gpu=self.device == "cuda")
        done = self._simulation = simulated(program, world_size, args, kwargs, options)
        if done.failure is not None:
            text = report.ending(Search(done, 1, False), colour.painter(sys.stdout))
            pytest.fail(f"{text}\n{place}", pytrace=False)
        for sentence in done.shared:
            warnings.warn(SharedByRanks(sentence), stacklevel=3)
        return list(done.returned)

    def _on_processes(self, program: Any, world_size: int, args: Any, kwargs: Any, place: str) -> list[Any]:
        from fsdpcheck.engines._real import gloo_ranks
        from fsdpcheck.report import colour
        from fsdpcheck.report import simulation as report

        done = gloo_ranks.run(program, world_size, args, kwargs, seconds=self._seconds)
        for rank, printed in enumerate(done.printed):
            for line in printed.splitlines():
                print(f"[rank {rank}] {line}")
        if done.failure is not None:
            pytest.fail(f"{report.failed(done.failure, colour.painter(sys.stdout))}\n{place}", pytrace=False)
        return list(done.returned)


def summary(runs: Mapping[str, int]) -> Iterator[str]:
    """The ranks of ``world`` that were used, a line a kind, with the metal that they really ran on."""
    for kind, count in runs.items():
        yield f"world: {count} run{'s' * (count > 1)} on {kind} ranks, {metal.of(kind).really}"


def of_session(config: pytest.Config, runs: Counter[str] | None = None) -> World:
    """What the command line, or else the configuration file, asks for. Raises UsageError for what cannot be read."""
    named = config.getoption(OPTION) or config.getini(INI)
    text = config.getini(TIMEOUT)
    try:
        seconds = float(text)
        if not 0 < seconds < float("inf"):
            raise ValueError
    except ValueError:
        raise UsageError(explain(f"{TIMEOUT} is no time", got=text, wanted="a number of seconds above 0")) from None
    return World(_kind(named), seconds, runs)


def _kind(named: str) -> Kind:
    for kind in KINDS:
        if kind == named:
            return kind
    raise UsageError(explain("there are no such ranks", got=named, wanted=", ".join(KINDS)))


def _called(program: Any, world_size: int, kind: Kind, frame: FrameType) -> str:
    name = getattr(program, "__qualname__", type(program).__qualname__).rpartition("<locals>.")[2]
    over = metal.of(kind).words
    ranks = f"{world_size} {'simulated ranks' if metal.is_simulated(kind) else f'real ranks, forked, on {over}'}"
    return f"  run     {name} on {ranks}, at {frame.f_code.co_filename}:{frame.f_lineno}"
