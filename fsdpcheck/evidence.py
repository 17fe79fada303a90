"""Evidence over cases: what further cases say about the cause of a finding. Never part of a verdict.

One minimal case is degenerate: with W = 2 = K = N several mistakes compute the same. So some further cases are drawn
and judged. A suspicion stays only if it fits every failing case that can tell; and where only cases of one kind fail,
that is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpcheck import floors
from fsdpcheck.case import Case
from fsdpcheck.suspects import Suspects, common, named

CASES = 24
"""How many further cases are drawn after a finding."""

DIAGNOSED = 12
"""Of how many failing cases suspects are looked for: that takes longer than to run them."""

_CHANCE = 1e-3
"""A kind of case is named when chance would single it out less often, after allowing for the number of kinds."""


@dataclass
class Evidence:
    """What was seen of one broken law: suspects of failing cases, and which of the drawn cases failed.

    Cases that shrinking visits are not drawn: they are alike, so they tell nothing about kinds of case.
    """

    suspects: list[Suspects | None] = field(default_factory=list)
    """Of at most DIAGNOSED failing cases."""
    drawn: dict[Case, bool] = field(default_factory=dict)
    """Case -> whether it failed."""

    def cause(self, minimal: Suspects | None) -> str:
        """The cause in the words of the minimal case; "" unless one or two suspicions fit all failing cases."""
        return named(common(minimal, self.suspects))

    def when(self) -> str:
        """Which kind of case fails, with counts; "" if none is singled out beyond chance."""
        failing = [_facts(case) for case, failed in self.drawn.items() if failed]
        passing = [_facts(case) for case, failed in self.drawn.items() if not failed]
        kinds = list(dict.fromkeys(fact for facts in (*failing, *passing) for fact in facts))
        chances = {kind: _chance(kind, failing, passing) for kind in kinds}
        best = min(chances.values(), default=1.0)
        if best * len(kinds) >= _CHANCE:
            return ""
        told = [_told(kind, failing, passing) for kind, chance in chances.items() if chance == best]
        return "; or ".join(told) if len(told) <= 2 else ""


def _facts(case: Case) -> Mapping[str, bool]:
    """Every kind the case may be of, and whether it is."""
    found = {f"with {name}": value for name, value in floors.census(case).items()}
    traits = case.requires()
    found |= {f"with {trait}": trait in traits for trait in _TRAITS if f"with {trait}" not in found}
    return found | {name.replace("with ", "without ", 1): not value for name, value in found.items()}


_TRAITS = ("bias", "empty-rank", "root-parameters", "keep-unsharded", "tied-private", "project")


def _chance(kind: str, failing: Sequence[Mapping[str, bool]], passing: Sequence[Mapping[str, bool]]) -> float:
    """Probability that the failing cases, were they picked blindly, are all of the kind; 1 if not all are."""
    if not all(facts[kind] for facts in failing):
        return 1.0
    of_kind = len(failing) + sum(facts[kind] for facts in passing)
    return math.comb(of_kind, len(failing)) / math.comb(len(failing) + len(passing), len(failing))


def _told(kind: str, failing: Sequence[Mapping[str, bool]], passing: Sequence[Mapping[str, bool]]) -> str:
    inside = sum(facts[kind] for facts in passing)
    outside = len(passing) - inside
    also = f", beside {inside} that hold" if inside else ""
    return f"only cases {kind} fail: {len(failing)} of them{also}; none of {outside} others does"


def stages(differing: Sequence[tuple[str, bool]]) -> str:
    """The first stage that differs, from (stage, differs) in the order of a step; "" if none does."""
    names = [name for name, differs in differing if differs]
    right = [name for name, _ in _until(differing)]
    if not names:
        return ""
    return f"the {names[0]} differ first" + (f"; right until then: {', '.join(right)}" if right else "")


def _until(differing: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    for name, differs in differing:
        if differs:
            return
        yield name, differs
