"""check_law: draw cases for one law, judge each, and keep the smallest that breaks it."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import hypothesis
from hypothesis.errors import Unsatisfiable

from fsdpcheck.adapters.contract import WITHOUT_MODEL
from fsdpcheck.case import Case
from fsdpcheck.case.profiles import PROFILES, WORLD_SIZES
from fsdpcheck.compat.hypothesis_private import whether_exhausted, without_local_constants, without_mutations
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import INTERNAL, USAGE, NotExact, Refused
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import coverage
from fsdpcheck.judging.exploration import HOPELESS, UNLIKELY, Judging, OnCase, Stop, cases_of, seed_of, sizes_for
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import user_model as own_drawing

if TYPE_CHECKING:
    from fsdpcheck.judging.law import Law


def check_law(
    law: Law,
    run: Run,
    profile: str = "quick",
    world_sizes: tuple[int, ...] = (),
    *,
    seed: int = 0,
    deadline: float | None = None,
    on_case: OnCase | None = None,
    shrink: bool = True,
    most: int | None = None,
) -> Verdict:
    """Judge ``law`` on distinct cases, at ``most`` PROFILES[profile] unless said; the same arguments, the same verdict.

    Cases have the numbers of ranks in ``world_sizes``; () stands for WORLD_SIZES[profile].
    Where the cases lack a label that the law's must have, further ones are drawn for it. A law of fewer cases than the
    quick profile has, or of all where there are fewer, or without these labels, is "too few cases"; of ``most`` cases
    below that number no label is demanded.
    ``on_case`` is called before each case runs. ``deadline`` (time.monotonic) stops drawing; a law that has its
    cases and labels then holds, with a note. Without ``shrink`` a finding keeps the first case that breaks the law.
    Raises nothing but KeyboardInterrupt: what goes wrong is in the verdict.
    """
    asked = world_sizes or WORLD_SIZES[profile]
    unasked = _not_asked(law, run, asked)
    if unasked is not None:
        return unasked
    world_sizes = sizes_for(law, asked, run.features.max_world_size)
    started = time.monotonic()
    count, least = most or PROFILES[profile], PROFILES["quick"]
    check = Judging(law, run.watching(law.observe), on_case, deadline, _limits(run, world_sizes), min(count, least))
    if count >= least:
        check.labels = coverage.demanded(law.space.must_occur, law.space.vacuous_without, check.limits)
        check.sought = coverage.sought(law.space.must_occur, check.limits)
    stop = _explore(check, count, world_sizes, seed, shrink) or _reach(check, world_sizes, seed, shrink)
    varied = check.varied(check.violations[-1][0], check.asked, stop) if shrink and check.violations else None
    if varied is None and shrink and stop is None and check.violations and run.engine.name == "simulated":
        check.look_further(world_sizes, seed)
    check.left.update(dict.fromkeys(run.engine.settle()))
    verdict = varied or check.verdict(stop)
    return replace(verdict, seconds=time.monotonic() - started).bounded()


def check_case(law: Law, run: Run, case: Case, *, deadline: float | None = None, diagnose: bool = True) -> Verdict:
    """Judge ``law`` on one case, as when a token is replayed. Raises UsageError and NoProgress.

    With ``diagnose``, further cases are drawn on simulated ranks, until ``deadline``: one alone fits several mistakes.
    And the case is run several times, for one that gives other results each time is a finding of its own, if it holds.
    """
    started = time.monotonic()
    check = Judging(law, run.watching(law.observe), None, deadline, _limits(run, (case.world_size,)))
    run.ran.clear()
    try:
        law.body(case, check.run)
    except Violation as violation:
        if check.refused_for_mixing(case):
            return replace(check.not_supported, seconds=time.monotonic() - started).bounded()
        varied = check.varied(case, run.asked, None) if diagnose else None
        verdict = varied or check.broken_by(case, violation, diagnose)
    except NotExact as error:
        why = f"the case is outside the exact domain: {error}"
        verdict = Verdict(law.name, run.adapter_ref, "no case", rejected=1, reason=why, exit_code=INTERNAL)
    except Refused as error:
        check.refused[case] = str(error)
        verdict = check.not_supported
    else:
        varied = check.varied(case, run.asked, None) if diagnose else None
        verdict = varied or Verdict(law.name, run.adapter_ref, "holds", cases=1, left=tuple(run.ran.left))
    return replace(verdict, seconds=time.monotonic() - started).bounded()


def _not_asked(law: Law, run: Run, asked: tuple[int, ...]) -> Verdict | None:
    """What is said of a law of which no case is drawn on the numbers of ranks ``asked``; None where some are."""
    features, sizes, vain = run.features, sizes_for(law, asked), ""
    reason = law.not_promised(run.declared.features) or _avoided(law, run)
    if not reason:
        vain = law.vain_on(asked)
    if not reason and not vain and features.max_world_size is not None and features.max_world_size < min(sizes):
        words = ", ".join(map(str, sizes))
        vain = f"the adapter takes at most {features.max_world_size} ranks, asked were {words}"
    if vain and run.engine.name == TORCHRUN:  # nobody chose these numbers for the law
        return Verdict(law.name, run.adapter_ref, "not asked", reason=vain)
    if vain:
        return Verdict(law.name, run.adapter_ref, "no case", reason=vain, exit_code=USAGE)
    reason = reason or _not_of_own_models(law, run, sizes)
    return Verdict(law.name, run.adapter_ref, "not promised", reason=reason).bounded() if reason else None


def _avoided(law: Law, run: Run) -> str:
    """What every case of the law demands and the user avoids; "" if nothing."""
    avoided = ", ".join(sorted(law.needs_traits & run.avoid))
    return f"every case of it demands what is avoided: {avoided}" if avoided else ""


def _limits(run: Run, world_sizes: tuple[int, ...]) -> coverage.Limits:
    accepts, all_accepted = run.features.accepts, run.declared.features.accepts
    return coverage.Limits(accepts, world_sizes, all_accepted - accepts, run.own is not None)


def _not_of_own_models(law: Law, run: Run, world_sizes: tuple[int, ...]) -> str:
    """Why the law is not asked of the user's own model; "" where it is, and where there is none."""
    if run.own is None:
        return ""
    if law.promise in WITHOUT_MODEL:
        return "the law is about no model"
    if law.space.user_models == "never":
        return "the law brings models of its own: it is about certain layers, or large ones"
    if law.space.user_models == "known layers" and "own-layers" in run.own.traits:
        return "no bound is proved for how norms of layers of your own round; --real judges nothing of them"
    if law.space.user_models == "known layers" and run.own.names:
        return f"bounds are proved in float64 alone, and your model names {run.own.names}"
    return own_drawing.not_accepted(law.draw, run.features, world_sizes, run.own)


def _reach(check: Judging, world_sizes: tuple[int, ...], seed: int, shrink: bool) -> BaseException | None:
    """Have cases drawn for each label that must occur, or is sought, and has not; what ended it, or None."""
    for label in check.unreached if check.broken is None and check.enough else ():
        few = check.wanted if coverage.LABELS[label].computed else 1
        if label in check.unreached and check.broken is None:
            check.patience = UNLIKELY if coverage.LABELS[label].sought else HOPELESS
            stop = _explore(check, few, world_sizes, seed, shrink, label)
            if stop is not None and not isinstance(stop, Unsatisfiable) and check.patience:
                return stop
    return None


def _explore(
    check: Judging, most: int, world_sizes: tuple[int, ...], seed: int, shrink: bool, label: str = ""
) -> BaseException | None:
    """Let Hypothesis draw, cases that may have ``label``; what ended it, or None when it drew all it wanted."""
    settings = hypothesis.settings(
        max_examples=most,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=hypothesis.Verbosity.quiet,
        phases=(hypothesis.Phase.generate, *((hypothesis.Phase.shrink,) if shrink else ())),
        suppress_health_check=list(hypothesis.HealthCheck),  # time is the engine's, acceptance is counted by us
    )
    try:
        cases = cases_of(check.law, check.run, world_sizes)
        if label and not coverage.LABELS[label].computed:
            cases = cases.filter(partial(coverage.has, label=label))
        body = hypothesis.given(case=cases)(lambda case: check.judge(case))
        with without_local_constants(), without_mutations(), whether_exhausted() as ended:
            hypothesis.seed(seed_of(f"{check.law.name} {label}".rstrip(), seed))(settings(body))()
    except Violation:
        return None
    except (Exception, Stop) as stop:
        return stop
    check.exhausted = check.exhausted or bool(ended)
    return None
