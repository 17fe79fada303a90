"""Evidence over cases: what further cases say about the cause of a finding. Never part of a verdict.

One minimal case is degenerate: with W = 2 = K = N several mistakes compute the same. So some further cases are drawn
and judged. A cause stays only if it fits every failing case that can tell; and where only cases of one kind fail,
that is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.checks import square_roots
from fsdpcheck.checks._compare import alike
from fsdpcheck.checks._read import local_rows
from fsdpcheck.execution import RunRequest, StepRecord
from fsdpcheck.findings.cause import Causes, common, named
from fsdpcheck.judging import coverage_minimums
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import Answer, StepAnswer, standards

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

    causes: list[Causes | None] = field(default_factory=list)
    """Of at most DIAGNOSED failing cases."""
    drawn: dict[Case, bool] = field(default_factory=dict)
    """Case -> whether it failed."""

    def cause(self, minimal: Causes | None) -> str:
        """The cause in the words of the minimal case; "" unless one or two causes fit all failing cases."""
        return named(common(minimal, self.causes))

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


_INITIAL, _NORMS, _FACTORS = "the parameters before the first step", "the norms", "the clip factors"
_GRADIENT, _PARAMETERS = "the reduced gradient", "the parameters"


def stage(run: Run, case: TrainingCase, asked: RunRequest | None = None) -> str:
    """What of a step differs first from the single device's, and what is right until then; "" where none can be told.

    From one more run of ``case`` that records all its adapter shows, with the features of FSDP2 in use that were
    ``asked`` for, and nothing is told if they were asked for in another case. Only what must agree in every bit is
    looked at: no nested norms, no sums of weighted gradients that round, no replay. Local sums and optimizer states are
    not recorded: where what follows from one is wrong and what leads to it right, it is said to lie in between.
    """
    using, probes = (asked.using, asked.probes) if asked is not None and asked.using else ((), ())
    if asked is not None and using and asked.case != case:
        return ""
    tier = run.tier(case)
    if tier == "replay" or run.features.factor.nested:
        return ""
    wanted = {"norms", "factors"} if case.step.private else set()
    whole = standards.every_bit(tier)
    wanted |= {"grads"} if whole else set()
    answer, execution = run.answer(case), run(case, run.features.observables & wanted, using=using, probes=probes)
    if execution.failure is not None:
        return ""
    before = answer.steps[0].before
    if any(not alike(own.initial.get(name), value) for own in execution.ranks for name, value in before.items()):
        return f"the first to differ: {_INITIAL}"
    right: dict[str, None] = {}
    in_use = f" (with {', '.join(using)} in use)" * bool(using)
    for number, step in enumerate(answer.steps):
        seen = [_stages(answer, number, step, result.rank, result.steps[number]) for result in execution.ranks]
        for name in (each for each in seen[0] if whole or each in (_NORMS, _FACTORS)):
            if any(own[name] for own in seen):
                return f"the first to differ, in step {number}{in_use}: {name}{_between(name, number, list(right))}"
            right[name] = None
    return f"right, as far as they are compared bit for bit{in_use}: {', '.join(right)}" if right else ""


def _between(name: str, step: int, right: Sequence[str]) -> str:
    """What was right until ``name`` was not, and what lies between."""
    until = f"; right until then: {', '.join(right)}" if right else ""
    if name == _PARAMETERS and _GRADIENT in right:
        state = ", the optimizer's state" if step else ""
        return f"{until}: so the update{state}, or the gathering of what was updated"
    if name == _GRADIENT and _FACTORS in right:
        return f"{until}: so the clipped sum, or its reduction"
    return until


def _stages(answer: Answer, number: int, step: StepAnswer, rank: int, record: StepRecord) -> dict[str, bool]:
    """Stage -> whether it differs, in the order of a step, of those that were recorded."""
    found: dict[str, bool] = {}
    rows = local_rows(answer.case, number, rank, step.samples)
    if record.norms is not None:
        found[_NORMS] = not alike(record.norms, square_roots.norms(answer, step, rows, record.norms))
    if record.factors is not None:
        found[_FACTORS] = not alike(record.factors, square_roots.factors(answer, step, rows, record.factors))
    if record.grads is not None:
        found[_GRADIENT] = any(not alike(record.grads.get(name), value) for name, value in step.used.items())
    found[_PARAMETERS] = any(not alike(record.params.get(name), value) for name, value in step.after.items())
    return found
