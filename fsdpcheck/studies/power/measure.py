"""Measuring power: the same cases run honestly and with each planted error, every run judged by every judge.

An error counts only where it was effective, that is where some recorded bit differs from the honest run's: a dropped
sample without gradient changes nothing and nobody can find it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fsdpcheck import strategies
from fsdpcheck.adapters.contract import Promise
from fsdpcheck.case import Case
from fsdpcheck.checks.training import assert_same_execution
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies.enumeration import distinct
from fsdpcheck.studies.power.judges import Tier, allclose, law_judge, watched

_NEUTRAL = "fsdpcheck.studies.power.neutral:"
_IMPL = "fsdpcheck.impl.faults:"
_SIZES = (3, 6, 9, 12)
_USUAL = ((1e-3, 1e-5), (1e-5, 1e-8))  # rtol, atol of tests in the wild, and of torch.allclose itself


@dataclass(frozen=True)
class Family:
    """Cases of one kind, the laws that judge them, and the errors planted in them. ``baseline``: allclose as well."""

    name: str
    tier: Tier
    promise: Promise
    space: strategies.Space
    laws: tuple[str, ...]
    errors: tuple[str, ...]
    baseline: bool = True


@dataclass
class Tally:
    """One judge in one family: errors found and effective, by error name; ``alarms`` on honest runs."""

    tier: Tier
    family: str
    judge: str
    honest: int = 0
    alarms: int = 0
    found: Counter[str] = field(default_factory=Counter)
    effective: Counter[str] = field(default_factory=Counter)

    @property
    def smallest(self) -> dict[str, float]:
        """By kind of graded error ("factor off by"), the smallest size that was found every time it was effective."""
        best: dict[str, float] = {}
        for error, count in self.effective.items():
            graded = re.fullmatch(r"(.*)_1e_(\d+)", error)
            if graded and count and self.found[error] == count:
                best[graded[1]] = min(best.get(graded[1], 1.0), 10.0 ** -int(graded[2]))
        return best


def _graded(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_1e_{size}" for size in _SIZES)


_SAMPLES = tuple(_NEUTRAL + name for name in ("sample_dropped", "sample_duplicated", "targets_swapped"))
_GRADIENTS = _graded(_NEUTRAL + "gradient_off_by")
_SECOND_PASS = tuple(
    _IMPL + name for name in ("sample_dropped_in_second_pass", "sample_doubled_in_second_pass", "factors_swapped")
)
_FACTORS = (
    *_graded(_IMPL + "factor_off_by"), *_graded(_IMPL + "squared_norm_off_by"), *_SECOND_PASS,
    *(_IMPL + name for name in ("bias_left_out_of_norm", "eps_outside_the_quotient", "eps_omitted")),
)  # fmt: skip
_MEANS = (_IMPL + "local_means",)

FAMILIES: tuple[Family, ...] = (
    Family(
        "plain", "exact", "plain", strategies.PLAIN, ("training.plain", "training.gradients"),
        (*_GRADIENTS, *_SAMPLES, *_MEANS),
    ),
    Family(
        "clipped", "exact", "exact-factors", strategies.PRIVATE_EXACT,
        ("training.private-clipped", "training.private-gradients", "clipping.norms", "clipping.factors"),
        (*_GRADIENTS, *_SAMPLES, *_FACTORS, *_MEANS),
    ),
    Family(
        "probe", "any C", "private", strategies.PRIVATE_PROBE.without(*strategies.HIDING),
        ("clipping.coefficients", "clipping.factors", "clipping.norms", "clipping.sum"),
        (*_SAMPLES, *_FACTORS, *_MEANS),
    ),
    Family(
        "real", "replay", "plain", strategies.REAL, ("rounding.gradients", "rounding.update"),
        (*_GRADIENTS, *_SAMPLES, *_MEANS), baseline=False,
    ),
    Family(
        "real private", "replay", "second-backward", strategies.REAL_PRIVATE, ("rounding.private-gradients",),
        (*_GRADIENTS, *_SAMPLES, *_SECOND_PASS), baseline=False,
    ),
)  # fmt: skip


def measure(
    run: Run,
    count: int,
    world_sizes: Sequence[int] = strategies.WORLD_SIZES,
    families: Iterable[Family] = FAMILIES,
    on_case: Callable[[Family, int], None] = lambda family, number: None,
) -> list[Tally]:
    """Tallies of every judge of every family that ``run``'s adapter promises, over ``count`` cases each.

    Errors planted inside fsdpcheck.impl are left out for other adapters. ``on_case(family, number)`` before each case.
    Raises UsageError if nothing is promised.
    """
    promised = [family for family in families if family.promise in run.features.promises]
    if not promised:
        raise UsageError(f"adapter {run.adapter_ref!r} promises none of: {', '.join(f.promise for f in families)}")
    return [tally for family in promised for tally in _measure(run, family, count, world_sizes, on_case)]


def _measure(
    run: Run, family: Family, count: int, world_sizes: Sequence[int], on_case: Callable[[Family, int], None]
) -> list[Tally]:
    laws = [law for law in _laws(family) if not law.not_promised(run.features)]
    judges = [law_judge(law) for law in laws]
    judges += [allclose(rtol, atol) for rtol, atol in _USUAL] if family.baseline else []
    tallies = [Tally(family.tier, family.name, judge.name) for judge in judges]
    together = Tally(family.tier, family.name, "all laws of the tier")
    observe = watched(run.features, laws, private=family.promise != "plain")
    errors = [error for error in family.errors if run.adapter_ref == "reference" or not error.startswith(_IMPL)]
    for number, case in enumerate(distinct(strategies.cases_of(family.space, run.features, world_sizes), count)):
        on_case(family, number)
        try:
            honest = run(case, observe=observe)
        except NotExact:
            continue
        planted = [] if honest.failure else _planted(run, case, observe, errors)  # a failed run hides every error
        for error, execution in [("", honest), *planted]:
            if error and not _effective(honest, execution):
                continue
            verdicts = [judge.finds(run, execution) for judge in judges]
            for tally, found in zip(tallies, verdicts, strict=True):
                _count(tally, error, found)
            _count(together, error, any(verdicts[: len(laws)]))
    return [together, *tallies]


def _planted(run: Run, case: Case, observe: Iterable[str], errors: Iterable[str]) -> Iterator[tuple[str, Execution]]:
    for error in errors:
        yield error.rpartition(":")[2], run(case, observe=observe, installs=(error,))  # type: ignore[arg-type]


def _laws(family: Family) -> list[Law]:
    known = chapters()
    return [known[name] for name in family.laws]


def _effective(honest: Execution, other: Execution) -> bool:
    if other.failure is not None or not any(other.install_hits.values()):
        return other.failure is not None
    try:
        assert_same_execution(honest, other)
    except Violation:
        return True
    return False


def _count(tally: Tally, error: str, found: bool) -> None:
    if not error:
        tally.honest += 1
        tally.alarms += found
        return
    tally.effective[error] += 1
    tally.found[error] += found
