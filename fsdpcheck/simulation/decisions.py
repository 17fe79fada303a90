"""Where the order of ranks matters, who goes first: decisions, known by what they decide and not by when.

Ranks that only exchange collectives and messages of a known source come to the same end in every order. Order matters
for a message from any source, for a store that several ranks use, for a work that is polled. In a run that is decided,
each of these waits until no rank can go on without it; what could happen next is then known, and one is chosen. (For
messages this is POE: Vakkalanka, Gopalakrishnan, Kirby, CAV 2008.)

A decision is named by the rank (and its thread), what it does, and the number of this among the like of it. So an order
is had again after edits that leave these: other lines and names of variables, other calls, on other groups too, other
keys, tags, files and threads. It is not after those that change them: one more receive from any source of the same tag
before, a key, file or function of a thread that is renamed. A wanted decision that does not come up is ``left``.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.simulation.scheduler import Baton


@dataclass(frozen=True, slots=True)
class Access:
    """What a rank does to something that ranks share. Two depend on each other if they share it and one writes."""

    rank: int
    shared: tuple[object, ...]
    writes: bool
    where: str = ""
    """file:line of the program."""

    def depends_on(self, other: Access) -> bool:
        """Whether their order matters."""
        return self.rank != other.rank and self.shared == other.shared and (self.writes or other.writes)


@dataclass(slots=True)
class Option:
    """What could happen next. ``of``: the name of what is decided; ``key``: with its outcome; ``act`` makes it so.

    ``taker``: whose turn it would be; the rank's own unless said otherwise. A taker has one such turn after another.
    """

    of: str
    key: str
    access: Access
    act: Callable[[], object]
    taker: str = ""

    def __post_init__(self) -> None:
        self.taker = self.taker or f"rank {self.access.rank}"


@dataclass(slots=True)
class Step:
    """Something that happened. ``options``: what else could have, by key; empty where nothing was decided.

    ``known``: by rank, how many steps of the run were done before the last one of it that this rank had heard of.
    """

    access: Access
    known: dict[int, int]
    options: dict[str, Option] = field(default_factory=dict)
    chosen: str = ""


@dataclass(frozen=True, slots=True)
class Woken:
    """A rank's own thread was woken, but another thread of the rank called before it went on; both with their lines."""

    rank: int
    where: str
    call: str
    thread: str


LATE: Final = "woken threads go on late"
"""A rule that stands among the decisions of an order, for all of it (simulation/thread_order.py)."""
_RULES: Final = (LATE,)
Choose = Callable[[Sequence[Option]], Option]


class Decisions:
    """The decisions of one run: those in ``wanted``, by key, as they come up; for the others ``otherwise`` chooses."""

    def __init__(
        self,
        wanted: Sequence[str] = (),
        otherwise: Choose = lambda options: options[0],
        refilled: Collection[str] = (),
    ) -> None:
        """``refilled``: where calls are issued whose buffers hold another poison than usual (in_flight.py)."""
        self.steps: list[Step] = []
        self.waiting: dict[int, Callable[[], list[Option]]] = {}
        """Of ranks that wait for a decision: what it could be by then."""
        self.idle: dict[int, list[Option]] = {}
        """Of ranks that do what changes nothing: what they do if no other can go on."""
        self.refilled = refilled
        self.rules = [key for key in wanted if key in _RULES]
        """What of ``wanted`` is no decision, but a rule for all of the run."""
        self.woken: list[Woken] = []
        """In a run that is `LATE`: which calls went before."""
        self._wanted, self._otherwise = [key for key in wanted if key not in _RULES], otherwise
        self._numbers: Counter[str] = Counter()
        self._known: dict[int, dict[int, int]] = {}
        self._written: dict[tuple[object, ...], dict[int, int]] = {}
        self._accessed: dict[tuple[object, ...], dict[int, int]] = {}

    @property
    def left(self) -> list[str]:
        """Wanted decisions that have not come up."""
        return list(self._wanted)

    @property
    def taken(self) -> list[Step]:
        """Those steps that were decided."""
        return [step for step in self.steps if step.options]

    def name(self, rank: int, what: str) -> str:
        """The name of something that a rank does, numbered among the like of it."""
        kind = f"rank {rank}: {what}"
        self._numbers[kind] += 1
        return f"{kind} #{self._numbers[kind] - 1}"

    def decide(self, options: Sequence[Option]) -> None:
        """Let one of them happen."""
        by_key = {option.key: option for option in options}
        wanted = next((key for key in self._wanted if key in by_key), None)
        if wanted is not None:
            self._wanted.remove(wanted)
        chosen = by_key[wanted] if wanted is not None else self._otherwise(options)
        self.note(chosen.access, by_key, chosen.key)
        chosen.act()

    def wait_for(self, rank: int, what: str, access: Access, baton: Baton) -> None:
        """Let a rank wait until it is decided that what it does happens next. May raise Aborted."""
        name = self.name(rank, what)

        def act() -> None:
            del self.waiting[rank]
            baton.wake(rank)

        self.waiting[rank] = lambda: [Option(name, name, access, act)]
        baton.block(rank)

    def note(self, access: Access, options: dict[str, Option] | None = None, chosen: str = "") -> None:
        """Write down what happens now."""
        mine = self.known_to(access.rank)
        self.steps.append(Step(access, dict(mine), options or {}, chosen))
        mine[access.rank] = len(self.steps)
        self.hear(access.rank, access.shared, writes=access.writes)

    def hear(self, rank: int, shared: tuple[object, ...], *, writes: bool) -> None:
        """A rank uses what ranks share: it comes to know what those before it knew, and those after it what it does."""
        mine = self.known_to(rank)
        written, accessed = self._written.setdefault(shared, {}), self._accessed.setdefault(shared, {})
        learn(mine, accessed if writes else written)
        learn(accessed, mine)
        if writes:
            learn(written, mine)

    def tick(self, rank: int) -> int:
        """The number of something that a rank does now and that is no step: who hears of it hears of this number."""
        self.steps.append(Step(Access(rank, ("nothing", len(self.steps)), False), dict(self.known_to(rank))))
        self.known_to(rank)[rank] = len(self.steps)
        return len(self.steps)

    def known_to(self, rank: int) -> dict[int, int]:
        """By rank: how far this one has heard of its steps."""
        return self._known.setdefault(rank, {})


def learn(mine: dict[int, int], more: dict[int, int]) -> None:
    """Know what another knew."""
    for rank, count in more.items():
        mine[rank] = max(mine.get(rank, 0), count)


def alternatives(steps: Sequence[Step]) -> dict[int, set[str]]:
    """By number of a decided step: the options that must be tried, too, for an end that has not been seen.

    Other outcomes of what was decided; and, where a later step of another rank depends on a decided one and was not
    caused by it, what that rank could have done instead (dynamic partial-order reduction: Flanagan, Godefroid, POPL
    2005).
    """
    found: dict[int, set[str]] = {}
    for place, step in enumerate(steps):
        if step.options:
            of = step.options[step.chosen].of
            found.setdefault(place, set()).update(o.key for o in step.options.values() if o.of == of)
        for before in reversed(range(place)):
            earlier = steps[before]
            races = step.known.get(earlier.access.rank, 0) <= before and step.access.depends_on(earlier.access)
            if races and earlier.options:
                own = {o.key for o in earlier.options.values() if o.access.rank == step.access.rank}
                found.setdefault(before, set()).update(own or earlier.options)
                break
    return {place: keys - {steps[place].chosen} for place, keys in found.items()}


_VERSION = "o1:"


def encoded(order: Sequence[str]) -> str:
    """Decisions as one word, which ``--order`` takes."""
    return _VERSION + base64.urlsafe_b64encode(zlib.compress(json.dumps(list(order)).encode())).decode()


def decoded(token: str) -> tuple[str, ...]:
    """The decisions of such a word. Raises UsageError for another one."""
    try:
        found = json.loads(zlib.decompress(base64.urlsafe_b64decode(token.removeprefix(_VERSION))))
        if not token.startswith(_VERSION) or not all(isinstance(key, str) for key in found):
            raise ValueError
    except (ValueError, TypeError, binascii.Error, zlib.error):
        wanted = f"{_VERSION} and what a report printed behind it"
        raise UsageError(explain("this is no order of ranks", got=token, wanted=wanted, then="copy it whole")) from None
    return tuple(found)
