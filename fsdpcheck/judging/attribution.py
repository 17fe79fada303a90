"""Evidence over cases: what further cases say about the cause of a finding. Never part of a verdict.

One minimal case is degenerate: with W = 2 = K = N several mistakes compute the same. So some further cases are drawn
and judged. A cause stays only if it fits every failing case that can tell; and where only cases of one kind fail,
that is said.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.findings.cause import DID_NOT_MOVE, OF_UPDATES, Causes, common, named
from fsdpcheck.judging import coverage_minimums, one_change
from fsdpcheck.judging.first_wrong import NOT_KNOWN, FirstWrong

CASES = 40
"""How many further cases are drawn after a finding."""

DIAGNOSED = 12
"""Of how many failing cases causes are looked for: that takes longer than to run them."""

_CHANCE = 0.01
"""A kind of case is named when chance would single it out less often, after allowing for the number of kinds."""


@dataclass
class Evidence:
    """What was seen of one broken law: causes of failing cases, and which of the drawn cases failed.

    Cases that shrinking visits are not drawn: they are alike, so they tell nothing about kinds of case.
    """

    causes: list[tuple[Case, Causes | None]] = field(default_factory=list)
    """Of at most DIAGNOSED failing cases."""
    drawn: dict[Case, bool] = field(default_factory=dict)
    """Case -> whether it failed."""

    def cause(
        self,
        minimal: Causes | None,
        first_wrong: FirstWrong = NOT_KNOWN,
        freezes: bool = False,
        holds_with: Collection[str] = (),
    ) -> str:
        """The cause in the words of the minimal case; "" unless one or two causes fit all failing cases.

        ``first_wrong``: the quantity of the minimal case that is wrong first. What is of the update alone is no cause
        of one before; behind a gradient that is missing, that parameters did not move is why. ``freezes``: whether that
        case has others frozen. ``holds_with``: changes that make the minimal case hold. Where no cause fits all, a case
        that fails although it is so does not count.
        """
        like = [own for case, own in self.causes if one_change.lacks(case, holds_with)]
        apart = [own for case, own in self.causes if not one_change.lacks(case, holds_with)]
        causes = common(minimal, like, apart)
        if first_wrong.quantity in ("", "updated"):
            return named(causes)
        before = [cause for cause in causes if not cause.key.startswith(OF_UPDATES)]
        others = named([cause for cause in before if cause.key != DID_NOT_MOVE])
        if others or first_wrong.quantity != "gradient" or not first_wrong.missing:
            return others
        as_if = ", as if it were frozen as others are" * freezes
        still = (cause.text for cause in causes if cause.key == DID_NOT_MOVE)
        return "".join(f"{text}{as_if}, for there is no gradient" for text in still)

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
    traits = case.requires()
    if not isinstance(case, TrainingCase):
        found = {f"with {trait}": trait in traits for trait in ("hsdp", "replicated", "wrap-around")}
        return found | {"with several ranks": case.world_size > 1, "with one rank": case.world_size == 1}
    found = {f"with {name}": value for name, value in coverage_minimums.census(case).items()}
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
