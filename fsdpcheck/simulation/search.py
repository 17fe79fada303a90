"""Every order that could matter: a program run again under each, until one fails or all have been tried."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.execution import Failure, RankState
from fsdpcheck.simulation.decisions import Decisions, Option, alternatives
from fsdpcheck.simulation.simulate import Options, Simulation, simulated

Once = Callable[[Decisions], Simulation]
MOST_SCHEDULES: Final = 1000


@dataclass(frozen=True)
class Search:
    """What came of a program under ``schedules`` orders of its ranks.

    ``simulation``: the one that failed, or the first. ``complete``: no other order can end otherwise, if what ranks
    compute depends on nothing but what they are given. ``order``: the decisions that the failure needs, by name.
    ``voids``: why even all these orders are no proof.
    """

    simulation: Simulation
    schedules: int
    complete: bool
    order: tuple[str, ...] = ()
    voids: tuple[str, ...] = ()

    @property
    def proved(self) -> bool:
        """Whether every order comes to the same end."""
        return self.complete and self.simulation.failure is None and not self.voids

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
    per_node: int = 0,
    budget: float | None = None,
) -> Search:
    """Run ``program`` as ``simulate`` does, under every order of ranks that could end otherwise, ``most`` at most.

    Orders differ in who is received by a receive from any source, in who uses a key of a store or a file first, and in
    what a work answers that is polled: 'not yet' is tried once a work. Everything else that ranks exchange comes to the
    same end in every order. The search stops at the first order that fails, or whose ranks return something else
    than the first order's ("order"), and takes from it the decisions that the failure does not need.

    Guarantee: ``proved`` is True only if all those orders were run, all came to their end with equal returned values,
    each repeated as far as it was meant to, and nothing was seen that makes more orders possible (``voids``).

    Between two orders each rank's environment, random generators, settings and modules imported by it are made anew.
    What is not: files, arguments, and what ``program`` refers to outside itself. A file that one order leaves and the
    next could read is a void.
    Raises what ``simulate`` raises, and UsageError for a ``most`` below 1.
    """
    _require(most)
    wanted = kwargs or {}

    def once(decisions: Decisions) -> Simulation:
        options = Options(per_node=per_node, budget=budget, show=False, decisions=decisions)
        return simulated(program, world_size, args, wanted, options)

    return every_order(once, most)


def every_order(once: Once, most: int = MOST_SCHEDULES) -> Search:
    """Try each order that could end otherwise, depth first, ``most`` of them at most; stop at the first failure."""
    first: Simulation | None = None
    begun: list[str] = []
    voids: set[str] = set()
    path: list[_Point] = []
    for count in range(1, most + 1):
        decisions = Decisions([point.chosen for point in path])
        done = once(decisions)
        if first is None:
            first, begun = done, [step.chosen for step in decisions.taken]
        done = _compared(first, done)
        voids |= {*done.voids, *_extend(path, decisions)}
        if done.failure is not None:
            return _shortest(once, first, done, decisions, count)
        if _go_on(path):
            voids |= {f"file {name} of one order was there in the next" for name in done.files_left}
        else:
            voids |= set(_repeated(once, first, begun))
            return Search(first, count, True, (), tuple(sorted(voids)))
    assert first is not None
    return Search(first, most, False, (), tuple(sorted(voids)))


def some_orders(once: Once, most: int, seed: int = 0) -> Search:
    """Try ``most`` orders drawn by priorities of ranks that change at drawn places (PCT: Burckhardt et al., 2010)."""
    first: Simulation | None = None
    voids: set[str] = set()
    for count in range(most):
        decisions = Decisions((), _Priorities(random.Random(f"{seed} {count}")).choose if count else lambda o: o[0])
        done = once(decisions)
        first = first or done
        done = _compared(first, done)
        voids |= set(done.voids)
        if done.failure is not None:
            return _shortest(once, first, done, decisions, count + 1)
        if not any(len(step.options) > 1 for step in decisions.taken):
            return Search(first, count + 1, True, (), tuple(sorted(voids)))
    assert first is not None
    return Search(first, most, False, (), tuple(sorted(voids)))


class _Priorities:
    """Ranks go by priority; at each decision one in eight loses it."""

    def __init__(self, draw: random.Random) -> None:
        self._draw, self._of = draw, dict[int, float]()

    def choose(self, options: Sequence[Option]) -> Option:
        for option in options:
            self._of.setdefault(option.access.rank, self._draw.random())
        chosen = max(options, key=lambda option: (self._of[option.access.rank], self._draw.random()))
        if self._draw.randrange(8) == 0:
            self._of[chosen.access.rank] = -self._draw.random()
        return chosen


_OTHERWISE: Final = "the program went another way in the same order of ranks: it is not deterministic"


def _repeated(once: Once, first: Simulation, begun: Sequence[str]) -> Iterator[str]:
    """A void if the first order, run once more, is another run."""
    decisions = Decisions(begun)
    again = _compared(first, once(decisions))
    if again.failure is not None or again.traces != first.traces or [step.chosen for step in decisions.taken] != begun:
        yield _OTHERWISE


def _extend(path: list[_Point], decisions: Decisions) -> Iterator[str]:
    """Put what was decided, and what else must be tried, on the path; a void if it has left it."""
    taken = decisions.taken
    if decisions.left:
        yield _OTHERWISE
    for point, step in zip(path, taken, strict=False):
        if point.chosen != step.chosen or point.options != frozenset(step.options):
            yield _OTHERWISE
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


def _compared(first: Simulation, done: Simulation) -> Simulation:
    """``done``, failed if its ranks have returned something else than those of the first order did."""
    if first is done or done.failure is not None or first.failure is not None:
        return done
    for rank, (one, other) in enumerate(zip(first.returned, done.returned, strict=True)):
        if not _equal(one, other):
            text = (
                f"order: what rank {rank} returns depends on the order of ranks\n"
                f"  first order    {_short(one)}\n  this order     {_short(other)}"
            )
            return replace(done, failure=Failure("order", text))
    return done


def _shortest(once: Once, first: Simulation, failed: Simulation, decisions: Decisions, count: int) -> Search:
    """The failure, with those decisions only that it needs: each other one is left to chance, one after another."""
    order = [step.chosen for step in decisions.taken if len(step.options) > 1]
    kind = failed.failure.kind if failed.failure is not None else ""
    for key in list(reversed(order)):
        fewer = [other for other in order if other != key]
        tried = _compared(first, once(Decisions(fewer)))
        count += 1
        if tried.failure is not None and tried.failure.kind == kind:
            order, failed = fewer, tried
    last = Decisions(order)
    again = _compared(first, once(last))
    if again.failure is None:  # it need not fail in the same order again
        assert failed.failure is not None
        return Search(failed, count + 1, False, tuple(order), tuple(sorted({*failed.voids, _OTHERWISE})))
    order = [key for key in order if key not in last.left]
    return Search(_told(again, again.failure, order, last), count + 1, False, tuple(order), again.voids)


def _told(failed: Simulation, failure: Failure, order: Sequence[str], decisions: Decisions) -> Simulation:
    """The same, with the decisions that the failure needs, what else could have been decided, and their lines."""
    lines, states = [], list(failure.ranks)
    for step in decisions.taken:
        if step.chosen in order:
            others = [key for key in step.options if key != step.chosen]
            for word, key in (("decided", step.chosen), *(("not", other) for other in others)):
                access = step.options[key].access
                lines.append(f"  {word:8} {key}, at {access.where or 'an unknown place'}")
                states.append(RankState(access.rank, "decided", key, access.where))
    ranks = tuple(states) if failure.kind == "order" else failure.ranks
    return replace(failed, failure=replace(failure, text="\n".join([failure.text, *lines]), ranks=ranks))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and bool(((one == other) | (one.isnan() & other.isnan())).all())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    says_nothing = type(one).__eq__ is object.__eq__  # type: ignore[comparison-overlap]
    return says_nothing or bool(one == other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _require(most: int) -> None:
    if most < 1:
        raise UsageError(explain("this is no number of schedules", got=most, wanted="1 or more"))
