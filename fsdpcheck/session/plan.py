"""Plan: what one session is asked to check, as plain data; imports neither torch nor hypothesis."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, get_args

from fsdpcheck.case import Trait
from fsdpcheck.case.fields import MAX_WORLD_SIZE
from fsdpcheck.errors import UsageError, spelling


@dataclass(frozen=True)
class Plan:
    """Which laws are checked on which adapters, on what ranks, how hard.

    ``world_sizes``: numbers of ranks, () for those of the profile. ``adapters``: references (see adapters.load).
    ``laws``: globs over law names. ``installs``: dotted names put in place in every run. ``seed`` 0 is the set of cases
    everybody sees; another explores elsewhere. ``budget``: seconds after which no further case is drawn, or None.
    ``confirm``: run each minimal case again on real gloo processes. ``avoid``: traits of cases that are not drawn,
    whatever the adapters accept.
    ``model``, ``batch``, ``loss``, ``optimizer``: references to a user's own, "" for none; ``units`` of it to shard,
    None to choose; ``real``: with its own weights and true functions, judged by replay.
    """

    adapters: tuple[str, ...]
    laws: tuple[str, ...] = ("*",)
    engine: str = "simulated"
    world_sizes: tuple[int, ...] = ()
    profile: str = "quick"
    installs: tuple[str, ...] = ()
    seed: int = 0
    budget: float | None = None
    confirm: bool = True
    avoid: tuple[Trait, ...] = ()
    model: str = ""
    batch: str = ""
    loss: str = ""
    optimizer: str = ""
    units: tuple[str, ...] | None = None
    real: bool = False
    laws_from: tuple[str, ...] = ()
    """Files or modules with laws of one's own."""
    roots: int = 8
    """Findings of one law, each of another root, before its judging ends."""
    coverage: str = ""
    """A folder for what is measured of lines and branches that run; "" for nothing."""
    shard: tuple[int, int] = (1, 1)
    """Which of how many parts of the session is judged: (3, 8) is the third of eight."""
    block: tuple[int, int] = (1, 1)
    """Which of how many sessions this is that differ in the seed alone, which is one more in each."""

    @property
    def own(self) -> tuple[str, str, str, str]:
        """The references to a user's own model, batch, loss and optimizer."""
        return self.model, self.batch, self.loss, self.optimizer

    def to_json(self) -> str:
        """One line of JSON; ``from_json`` is its inverse."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        data: dict[str, Any] = json.loads(text)
        fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}
        return Plan(**fields)


def parse_world_sizes(text: str) -> tuple[int, ...]:
    """(1, 2, 3) from "1-3", (2, 4) from "2,4". Raises UsageError naming what is wrong."""
    sizes: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:\s*-\s*(\d{1,4}))?\s*", part)
        if not found:
            raise UsageError(f"world size {text!r}: wanted a number, a range or a list, such as 3, 1-5 or 2,4")
        first, last = int(found[1]), int(found[2] or found[1])
        if not 1 <= first <= last <= MAX_WORLD_SIZE:
            raise UsageError(f"world size {text!r}: wanted 1 <= first <= last <= {MAX_WORLD_SIZE}, got {first}-{last}")
        sizes.update(range(first, last + 1))
    return tuple(sorted(sizes))


def parse_globs(text: str) -> tuple[str, ...]:
    """("norms.*", "state.noise") from "norms.*, state.noise"; "" where there is nothing between two commas."""
    return tuple(part.strip() for part in text.split(","))


def parse_traits(text: str) -> tuple[Trait, ...]:
    """("tied", "frozen") from "tied,frozen". Raises UsageError for a trait that nobody knows."""
    known: tuple[Trait, ...] = get_args(Trait)
    wanted = [part.strip() for part in text.split(",")]
    if unknown := [part for part in wanted if part not in known]:
        told = spelling.hint(unknown[0], known) or " Next: `fsdpcheck list traits` names all."
        raise UsageError(f"there is no trait {', '.join(map(repr, unknown))}.{told}")
    return tuple(trait for trait in known if trait in wanted)
