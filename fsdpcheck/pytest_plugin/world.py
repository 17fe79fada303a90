"""The fixture ``world``: a function as W ranks in a user's own tests, on simulated ranks or on real ones.

It imports torch when a test first runs something, and not before.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import pytest

from fsdpcheck.errors import UsageError, explain

if TYPE_CHECKING:
    from fsdpcheck.simulation.simulate import Simulation

Kind = Literal["simulated", "processes"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
OPTION, INI, TIMEOUT = "--fsdpcheck-world", "fsdpcheck_world", "fsdpcheck_world_timeout"


class SharedByRanks(UserWarning):
    """Simulated ranks share something that real ranks have a copy of each, and one of them wrote to it."""


class World:
    """Ranks for tests. ``kind``: "simulated" or "processes", as the session was asked for; ``on`` gives the other."""

    def __init__(self, kind: Kind, seconds: float) -> None:
        self.kind, self._seconds = kind, seconds
        self._simulation: Simulation | None = None

    def on(self, kind: Kind) -> World:
        """Ranks of this kind, whatever the session was asked for. Raises UsageError for a kind that there is not."""
        return World(_kind(kind), self._seconds)

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
        place = _called(program, world_size, self.kind, sys._getframe(1))
        if self.kind == "processes":
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
        from fsdpcheck.simulation.simulate import simulate

        done = self._simulation = simulate(program, world_size, args, kwargs)
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


def of_session(config: pytest.Config) -> World:
    """What the command line, or else the configuration file, asks for. Raises UsageError for what cannot be read."""
    named = config.getoption(OPTION) or config.getini(INI)
    text = config.getini(TIMEOUT)
    try:
        seconds = float(text)
        if not 0 < seconds < float("inf"):
            raise ValueError
    except ValueError:
        raise UsageError(explain(f"{TIMEOUT} is no time", got=text, wanted="a number of seconds above 0")) from None
    return World(_kind(named), seconds)


def _kind(named: str) -> Kind:
    for kind in KINDS:
        if kind == named:
            return kind
    raise UsageError(explain("there are no such ranks", got=named, wanted=" or ".join(KINDS)))


def _called(program: Any, world_size: int, kind: Kind, frame: FrameType) -> str:
    name = getattr(program, "__qualname__", type(program).__qualname__).rpartition("<locals>.")[2]
    ranks = f"{world_size} {'simulated ranks' if kind == 'simulated' else 'real ranks, forked, on gloo'}"
    return f"  run     {name} on {ranks}, at {frame.f_code.co_filename}:{frame.f_lineno}"
