"""Verdicts in words: what is reported of one law, given what was counted, what broke it, and what ended the drawing."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import replace
from itertools import starmap
from typing import Final

from hypothesis.errors import Flaky

from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.case.traits import OF_MODELS
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import FINDING, INTERNAL, NO_PROGRESS, USAGE, FsdpcheckError, OtherWorldSize
from fsdpcheck.findings.tokens import Token, command, encode
from fsdpcheck.findings.verdict import INEXACT, Finding, Verdict, exit_code
from fsdpcheck.judging import coverage, model_refusals
from fsdpcheck.judging.climbing import told
from fsdpcheck.judging.exploration import Exploration, Stop

_OTHER_NUMBERS: Final = "try --real: the model as it is, its own weights, judged by the rounding laws"
_OTHER_DTYPE: Final = (
    "leave --param-dtype out where fsdpcheck judges: float64 and float32 have room for more; then --real is there too"
)
_OTHER_CASES: Final = "have the adapter accept or show more, avoid fewer traits, or take the promise away"
_OTHER_LAWS: Final = "leave this law out (--law), or put another function in that place: nothing is claimed of it"

_OTHER_RANKS: Final = "ask for other numbers of ranks as well (--world-size), or leave this law out (--law)"

_CODES: Final[dict[coverage.Cause, int]] = {
    "budget": NO_PROGRESS, "restriction": USAGE, "ranks": USAGE, "own model": USAGE, "drawing": INTERNAL,
}  # fmt: skip


def verdict(found: Exploration, stop: BaseException | None) -> Verdict:
    """The verdict, given what ended the drawing (None: Hypothesis is done)."""
    tally, spent = found.tally, isinstance(stop, Stop)
    if found.broken is not None:
        return _flaky(found, found.broken.finding) if isinstance(stop, Flaky) else _shrunk(found, stop)
    if isinstance(stop, Stop) and isinstance(stop.error, OtherWorldSize):
        reason = f"on at most {stop.error.there} ranks: its cases run on more as well"
        return replace(held(found), status="not asked", reason=reason)
    if isinstance(stop, Stop) and stop.error is not None:
        return _error(found, stop.error, stop.case)
    if tally.hopeless:
        stop, spent = None, False
    if stop is not None and not spent:
        return _error(found, stop, None)
    if tally.refused:
        return not_supported(found)
    if not tally.judged:
        return _no_case(found, spent)
    if short := coverage.shortfall(tally.labels, tally.limits, tally.outcome(spent)):
        told = replace(held(found), status="too few cases", reason=short.reason, exit_code=_CODES[short.cause])
        return _not_here(found, told) if short.cause == "ranks" else told
    never = [name for name in found.run.installs if not tally.hits[name]]
    notes = ["the budget was spent before all cases were drawn"] * spent
    notes += [f"never hit, so this says nothing of it: {', '.join(never)}"] * bool(never)
    return replace(held(found), reason="; ".join(notes))


def held(found: Exploration) -> Verdict:
    """What would be said if nothing had gone wrong."""
    tally = found.tally
    return Verdict(
        found.law.name,
        found.run.adapter_ref,
        "holds",
        len(tally.judged),
        len(tally.rejected),
        census=dict(sorted(tally.census.items())),
        undrawn=_undrawn(found),
        never=_never(found),
        left=tuple(tally.left),
        reached=tuple(starmap(told, sorted(tally.reached.items()))),
    )


def broken(found: Exploration, finding: Finding, code: int = FINDING) -> Verdict:
    """The law is broken, and this is the finding."""
    return replace(held(found), status="finding", finding=finding, exit_code=code)


def diagnosed(found: Exploration, note: str = "") -> Verdict:
    """The finding with its cause; it says so where fsdpcheck failed to look for one."""
    assert found.broken is not None
    finding, undiagnosed = found.broken.finding, found.undiagnosed
    try:
        finding = found.broken.diagnosed()
    except Exception:
        undiagnosed = undiagnosed or traceback.format_exc().rstrip()
    if not undiagnosed:
        return broken(found, replace(finding, note=note))
    notes = [note] * bool(note) + [f"fsdpcheck failed to look for the cause: {undiagnosed}"]
    return broken(found, replace(finding, note="; ".join(notes)), INTERNAL)


def ended_behind(found: Exploration, stop: BaseException | None) -> str:
    """What ended the judging behind a finding, if not all of its cases are judged by then."""
    if stop is None:
        return ""
    error, case = (stop.error, stop.case) if isinstance(stop, Stop) else (stop, None)
    if error is None:
        return "the budget was spent before all other cases were judged"
    return f"an error ended the judging of other cases: {_error(found, error, case).reason}"


def not_supported(found: Exploration) -> Verdict:
    """What is said of a model that the adapter refuses, if only in some cases: no pass."""
    tally = found.tally
    reports = (text for text, _ in Counter(tally.refused.values()).most_common())
    reason = model_refusals.verdict_text(reports, len(tally.refused), len(tally.judged))
    return replace(held(found), status="not supported", reason=reason, exit_code=USAGE)


def _never(found: Exploration) -> tuple[str, ...]:
    """What the law names and no judged case was, in words."""
    accepts = found.run.declared.features.accepts  # what it does not accept is told once for all laws
    labels = dict.fromkeys((*found.law.space.vacuous_without, *found.law.space.must_occur))
    named = [label for label in labels if coverage.LABELS[label].traits <= accepts]
    return tuple(coverage.LABELS[label].words for label in coverage.missing(named, found.tally.census))


def _undrawn(found: Exploration) -> tuple[str, ...]:
    """Accepted traits that no judged case demanded; none for laws whose cases train nothing."""
    if not any(isinstance(case, TrainingCase) for case in found.tally.judged):
        return ()
    fixed = OF_MODELS if found.run.own is not None else frozenset()
    return tuple(sorted(found.run.features.accepts - set(found.tally.census) - fixed))


def _shrunk(found: Exploration, stop: BaseException | None) -> Verdict:
    """The finding, given what ended its shrinking: an error in another case takes nothing from it, and is told."""
    if stop is None:
        return diagnosed(found)
    error, case = (stop.error, stop.case) if isinstance(stop, Stop) else (stop, None)
    if error is None:
        return diagnosed(found, "the budget ended the shrinking; a smaller case may exist")
    ended = _error(found, error, case)
    told = diagnosed(found, f"an error ended the shrinking; a smaller case may exist: {ended.reason}")
    return replace(told, exit_code=exit_code((told.exit_code, ended.exit_code)))


def _flaky(found: Exploration, finding: Finding) -> Verdict:
    if finding.kind == "lost":
        reason = (
            f"{finding.got.splitlines()[0]}\n  where   in {finding.words}\n"
            "  wanted  all ranks finish, as they did when the same case ran again: nothing in the code explains it\n"
            "  next    look for who ended the process, such as the system when memory ran out, and run it again"
        )
        return replace(held(found), status="error", reason=reason, exit_code=INTERNAL)
    reason = (
        f"the law broke and then held on the same case, so the run is not deterministic ({finding.what}); gloo"
        " processes showed no difference: state that simulated ranks share (Features.rank_local), or an error of"
        f" fsdpcheck; replay with: {command(finding.token, finding.adapter, found.run.installs, [found.law.file])}"
    )
    return replace(held(found), status="error", reason=reason, exit_code=INTERNAL)


def _no_case(found: Exploration, spent: bool) -> Verdict:
    tally = found.tally
    if spent:
        reason = "the budget was spent before the first case"
        return replace(held(found), status="no case", reason=reason, exit_code=NO_PROGRESS)
    unfit = 2 * len(tally.unfit) > len(tally.rejected)
    reason = f"promised, but no case could be judged: {len(tally.rejected)} drawn and rejected"
    reason += "" if unfit else f" {INEXACT}"
    reason += "".join(f"\n  most often: {text}" for text, _ in tally.reasons.most_common(1))
    then, code = "", INTERNAL
    if found.run.own is not None:
        real = any("real" in case.requires() for case in tally.rejected)
        few = found.tally.limits.few_bits
        then, code = _OTHER_LAWS if real else _OTHER_DTYPE if few else _OTHER_NUMBERS, USAGE
    elif tally.outcome(spent).needs_other_ranks:
        then, code = _OTHER_RANKS, USAGE
    elif unfit:
        then, code = _OTHER_CASES, USAGE
    reason += f"\n  next    {then}" if then else ""
    told = replace(held(found), status="no case", reason=reason, exit_code=code)
    return _not_here(found, told) if then == _OTHER_RANKS else told


def _not_here(found: Exploration, told: Verdict) -> Verdict:
    """``told`` of cases that are kept out by the number of ranks; under torchrun nobody chose it for the law."""
    if found.run.engine.name != TORCHRUN:
        return told
    why = found.tally.reasons.most_common(1)[0][0]
    reason = f"on {max(found.tally.limits.world_sizes)} ranks: {why}"
    return replace(told, status="not asked", reason=reason, exit_code=0)


def _error(found: Exploration, error: BaseException, case: Case | None) -> Verdict:
    law, run, reason = found.law, found.run, str(error)
    if not isinstance(error, FsdpcheckError):
        reason = "".join(traceback.format_exception(error)).rstrip()
    if case is not None:
        token = encode(Token(law.name, run.adapter_ref, case, run.installs))
        again = command(token, run.adapter_ref, run.installs, [law.file])
        reason += f"\nin case {case.describe()}\nreplay with: {again}"
    return replace(held(found), status="error", reason=reason, exit_code=getattr(error, "exit_code", INTERNAL))
