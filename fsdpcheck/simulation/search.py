"""Every order that could matter: a program run again under each, until one fails or all have been tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.simulation import smaller_worlds
from fsdpcheck.simulation.comparison import compared
from fsdpcheck.simulation.decisions import LATE, Decisions, alternatives
from fsdpcheck.simulation.priorities import DEPTH, Drawn, Priorities, choices, takers
from fsdpcheck.simulation.repetition import OTHERWISE, Once, repeated
from fsdpcheck.simulation.simulate import Options, Simulation, simulated
from fsdpcheck.simulation.stragglers import VOID

MOST_SCHEDULES: Final = 1000
DRAWN: Final = 100
"""Orders that are drawn where that many are not all."""


@dataclass(frozen=True)
class Search:
    """What came of a program under ``schedules`` orders of its ranks.

    ``simulation``: the one that failed, or the first. ``complete``: no other order can end otherwise, if what ranks
    compute depends on nothing but what they are given. ``order``: the decisions that the failure needs, by name.
    ``voids``: why even all these orders are no proof. ``drawn``: those of the orders that were drawn at random, and
    what that promises; None where none was. ``smaller``: the same failure in the smallest world that has it;
    ``worlds_tried``: in which it was looked for.
    """

    simulation: Simulation
    schedules: int
    complete: bool
    order: tuple[str, ...] = ()
    voids: tuple[str, ...] = ()
    drawn: Drawn | None = None
    smaller: Search | None = None
    worlds_tried: tuple[int, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether every order comes to the same end."""
        return self.complete and self.simulation.failure is None and not self.voids

    @property
    def did(self) -> str:
        """How many orders were run, and whether these are all that could end otherwise, in words."""
        if self.schedules == 1:
            return "one order of ranks was run"
        if self.complete and not self.voids:
            return f"all {self.schedules} orders of ranks that could end otherwise were run"
        return f"{self.schedules} orders of ranks were run"

    def check(self) -> Search:
        """Itself. Raises SimulationFailed, with the report, if an order failed."""
        self.simulation.check()
        return self


@dataclass(slots=True)
class _Point:
    """A decision on the way that is being tried."""

    chosen: str
    options: frozenset[str]
    done: set[str]
    still: set[str] = field(default_factory=set)


def search(
    program: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    most: int = MOST_SCHEDULES,
    drawn: int = DRAWN,
    shrink: bool = False,
    per_node: int = 0,
    budget: float | None = None,
) -> Search:
    """Run ``program`` as ``simulate`` does, under every order of ranks that could end otherwise, ``most`` at most.

    Orders differ in who is received by a receive from any source, in who uses a key of a store or a file first, in
    which of a rank's threads calls first, makes a group first or takes a lock first, and in what a work answers that is
    polled: 'not yet' is tried once a work. Everything else that ranks exchange comes to the same end in every order.
    Where threads of a rank call, one order more lets its own thread, where it was woken, go on late.
    Where ``most`` are not all, ``drawn`` more are drawn at random (simulation/priorities.py), each of which finds a bug
    with the probability that ``Search.drawn`` names. The search stops at the first order that fails, or whose ranks
    return something else than the first order's ("order"), and takes from it the decisions that the failure does not
    need. ``shrink``: look for the same failure in smaller worlds, smallest first, with the same program and arguments,
    under as many orders as it took here (simulation/smaller_worlds.py).

    Guarantee: ``proved`` is True only if all those orders were run, all came to their end with equal returned values,
    each repeated as far as it was meant to, and nothing was seen that makes more orders possible (``voids``).

    Between two orders each rank's environment, random generators, settings and modules imported by it are made anew.
    What is not: files, arguments, and what ``program`` refers to outside itself. A file that one order leaves and the
    next could read is a void.
    Raises what ``simulate`` raises, and UsageError for a ``most`` below 1 or a ``drawn`` below 0.
    """
    _require(most, drawn)
    wanted = kwargs or {}
    options = Options(per_node=per_node, budget=budget, show=False)

    def tried(ranks: int, orders: int, more: int = 0) -> Search:
        def once(decisions: Decisions) -> Simulation:
            return simulated(program, ranks, args, wanted, replace(options, decisions=decisions))

        return every_order(once, orders, more)

    found = tried(world_size, most, drawn)
    return smaller_worlds.shrunk(found, tried, per_node) if shrink else found


def every_order(once: Once, most: int = MOST_SCHEDULES, drawn: int = 0) -> Search:
    """Try each order that could end otherwise, depth first, ``most`` of them at most; stop at the first failure.

    If these are not all, ``drawn`` more are drawn.
    """
    tries = _Tries(once)
    path: list[_Point] = []
    for _ in range(most):
        decisions = Decisions([point.chosen for point in path])
        done = tries.run(decisions)
        tries.voids |= set(_extend(path, decisions))
        if done.failure is not None:
            return tries.failed(done, decisions)
        if _go_on(path):
            tries.voids |= {f"file {name} of one order was there in the next" for name in done.files_left}
        else:
            voids, failed = repeated(once, tries.first, tries.begun)
            tries.voids |= set(voids)
            if failed is not None:
                return Search(failed, tries.count, complete=False)
            return tries.late() or tries.ended(complete=True)
    return _draw(tries, drawn) if drawn else tries.late() or tries.ended(complete=False)


def some_orders(once: Once, most: int, seed: int = 0, depth: int = DEPTH) -> Search:
    """Try ``most`` orders: the first, then such as are drawn for bugs of this depth (simulation/priorities.py)."""
    tries = _Tries(once)
    decisions = Decisions()
    done = tries.run(decisions)
    if done.failure is not None:
        return tries.failed(done, decisions)
    if not tries.choices:
        return tries.late() or tries.ended(complete=True)
    return _draw(tries, most - 1, seed, depth) if most > 1 else tries.ended(complete=False)


def _draw(tries: _Tries, many: int, seed: int = 0, depth: int = DEPTH) -> Search:
    """Orders that are drawn for as many choices as one has had so far."""
    counted = 0
    for number in range(1, many + 1):
        known = tries.choices
        decisions = Decisions((), Priorities(random.Random(f"{seed} {number}"), known, depth).choose)
        done = tries.run(decisions)
        counted = counted + 1 if tries.choices == known else 0
        tries.drawn = Drawn(number, depth, len(tries.takers), tries.choices, counted)
        if done.failure is not None:
            return tries.failed(done, decisions)
    return tries.late() or tries.ended(complete=False)


class _Tries:
    """The orders of one search that have been run, and what they have shown."""

    def __init__(self, once: Once) -> None:
        self._once, self.count, self.choices = once, 0, 0
        self.first: Simulation
        self.begun: list[str] = []
        """The decisions of the first order."""
        self.voids: set[str] = set()
        self.takers: set[str] = set()
        self.drawn: Drawn | None = None

    def run(self, decisions: Decisions) -> Simulation:
        """One more; failed, too, if its ranks return something else than the first's."""
        done = self._once(decisions)
        if not self.count:
            self.first, self.begun = done, [step.chosen for step in decisions.taken]
        self.count += 1
        self.takers |= takers(decisions.taken)
        self.choices = max(self.choices, choices(decisions.taken))
        done = compared(self.first, done)
        self.voids |= set(done.voids)
        return done

    def late(self) -> Search | None:
        """The first order once more, with threads that go on late; None if that comes to the same end, or has none."""
        decisions = Decisions([LATE, *self.begun])
        done = compared(self.first, self._once(decisions)) if VOID in self.voids else self.first
        if not decisions.woken:
            return None
        self.count += 1
        return None if done.failure is None else self.failed(done, decisions)

    def failed(self, done: Simulation, decisions: Decisions) -> Search:
        return replace(_shortest(self._once, self.first, done, decisions, self.count), drawn=self.drawn)

    def ended(self, *, complete: bool) -> Search:
        return Search(self.first, self.count, complete, (), tuple(sorted(self.voids)), self.drawn)


def _extend(path: list[_Point], decisions: Decisions) -> Iterator[str]:
    """Put what was decided, and what else must be tried, on the path; a void if it has left it."""
    taken = decisions.taken
    if decisions.left:
        yield OTHERWISE
    for point, step in zip(path, taken, strict=False):
        if point.chosen != step.chosen or point.options != frozenset(step.options):
            yield OTHERWISE
    for step in taken[len(path) :]:
        path.append(_Point(step.chosen, frozenset(step.options), {step.chosen}))
    places = [place for place, step in enumerate(decisions.steps) if step.options]
    more = alternatives(decisions.steps)
    for point, place in zip(path, places, strict=False):
        point.still |= more.get(place, set()) - point.done


def _go_on(path: list[_Point]) -> bool:
    """Turn to the next order; whether there is one."""
    while path and not path[-1].still:
        path.pop()
    if not path:
        return False
    point = path[-1]
    point.chosen = min(point.still)
    point.still.discard(point.chosen)
    point.done.add(point.chosen)
    return True


def _shortest(once: Once, first: Simulation, failed: Simulation, decisions: Decisions, count: int) -> Search:
    """The failure, with those decisions only that it needs: each other one is left to chance, one after another."""
    order = [*decisions.rules, *(step.chosen for step in decisions.taken if len(step.options) > 1)]
    kind = failed.failure.kind if failed.failure is not None else ""
    for key in list(reversed(order)):
        fewer = [other for other in order if other != key]
        tried = compared(first, once(Decisions(fewer)))
        count += 1
        if tried.failure is not None and tried.failure.kind == kind:
            order, failed = fewer, tried
    last = Decisions(order)
    again = compared(first, once(last))
    if again.failure is None:  # it need not fail in the same order again
        assert failed.failure is not None
        return Search(failed, count + 1, False, tuple(order), tuple(sorted({*failed.voids, OTHERWISE})))
    order = [key for key in order if key not in last.left]
    return Search(_told(again, again.failure, order, last), count + 1, False, tuple(order), again.voids)


def _told(failed: Simulation, failure: Failure, order: Sequence[str], decisions: Decisions) -> Simulation:
    """The same, with the decisions that the failure needs, what else could have been decided, and their lines."""
    lines, states = [], list(failure.ranks)
    for woken in decisions.woken[:1]:
        lines.append(f"  decided  rank {woken.rank}: {woken.thread} calls first, at {woken.call}")
        lines.append(f"  not      rank {woken.rank}: its own thread, which was woken, goes on, at {woken.where}")
        states += [RankState(woken.rank, "decided", LATE, at) for at in (woken.call, woken.where)]
    for step in decisions.taken:
        if step.chosen in order:
            others = [key for key in step.options if key != step.chosen]
            for word, key in (("decided", step.chosen), *(("not", other) for other in others)):
                access = step.options[key].access
                lines.append(f"  {word:8} {key}, at {access.where or 'an unknown place'}")
                states.append(RankState(access.rank, "decided", key, access.where))
    ranks = tuple(states) if failure.kind == "order" else failure.ranks
    return replace(failed, failure=replace(failure, text="\n".join([failure.text, *lines]), ranks=ranks))


def _require(most: int, drawn: int) -> None:
    if most < 1:
        raise UsageError(explain("this is no number of schedules", got=most, wanted="1 or more"))
    if drawn < 0:
        raise UsageError(explain("this is no number of schedules to draw", got=drawn, wanted="0 or more"))
