"""check_law: draw cases for one law, judge each, and keep the smallest that breaks it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hypothesis.errors import Flaky

from fsdpcheck.adapters.contract import WITHOUT_MODEL
from fsdpcheck.case import Case
from fsdpcheck.case.profiles import PROFILES, WORLD_SIZES
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import INTERNAL, USAGE, NotExact, Refused
from fsdpcheck.execution import RunRequest
from fsdpcheck.findings.roots import grouped
from fsdpcheck.findings.verdict import Verdict, exit_code
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import coverage, nondeterminism, wording
from fsdpcheck.judging.climbing import climb, rarity
from fsdpcheck.judging.counterexample import finding_of
from fsdpcheck.judging.exploration import Exploration, OnCase, sizes_for
from fsdpcheck.judging.known_root import KnownRoot
from fsdpcheck.judging.model_process import gives_classes, judge
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import Tally
from fsdpcheck.strategies import user_model as own_drawing

if TYPE_CHECKING:
    from fsdpcheck.judging.law import Law


_SIMULATED_ALONE: Final = (
    "it compares real ranks with simulated ones, and there are none; next: --engine processes, or torchrun -m fsdpcheck"
)


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
    roots: int = 1,
) -> Verdict:
    """Judge ``law`` on distinct cases, at ``most`` PROFILES[profile] unless said; the same arguments, the same verdict.

    Cases have the numbers of ranks in ``world_sizes``; () stands for WORLD_SIZES[profile].
    Where the cases lack a label that the law's must have, further ones are drawn for it. A law of fewer cases than the
    quick profile has, or of all where there are fewer, or without these labels, is "too few cases"; of ``most`` cases
    below that number no label is demanded.
    Of a law that climbs as many more are judged, from the ci profile on, on the way to cases that come nearer a bound;
    and of each that is measured, beyond the ci profile, on the way to cases that run branches that none has run.
    ``on_case`` is called before each case runs. ``deadline`` (time.monotonic) stops drawing; a law that has its
    cases and labels then holds, with a note. Without ``shrink`` a finding keeps the first case that breaks the law.
    With more than one of ``roots`` judging goes on behind a finding: cases that fail like it are set aside, the rest is
    judged, until no new root comes, or so many have.
    Raises nothing but KeyboardInterrupt: what goes wrong is in the verdict.
    """
    asked = world_sizes or WORLD_SIZES[profile]
    unasked = _not_asked(law, run, asked)
    if unasked is not None:
        return unasked
    world_sizes = sizes_for(law, asked, run.features.max_world_size)
    started = time.monotonic()
    count, least = most or PROFILES[profile], PROFILES["quick"]
    tally = Tally(_limits(run, world_sizes), min(count, least))
    if count >= least:
        tally.labels = coverage.demanded(law.space.must_occur, law.space.vacuous_without, tally.limits)
        tally.sought = coverage.sought(law.space.must_occur, tally.limits)
    recalling = replace(run.watching(law.observe), recalls=True)
    found = Exploration(law, recalling, tally, world_sizes, on_case, deadline, seed, shrink)
    stop, varied = found.explore(count), None
    if stop is None and found.broken is None and law.climbs and count > least:
        stop = climb(found, count)
    if stop is None and found.broken is None and run.measured and count > PROFILES["ci"]:
        stop = climb(found, count, rarity(found))
    if shrink and found.broken is not None:
        varied = _varied(found, found.broken.smallest, found.broken.asked, stop)
        if varied is None and stop is None and run.engine.name == "simulated":
            found.look_further()
    tally.left.update(dict.fromkeys(run.engine.settle()))
    verdict = varied or wording.verdict(found, stop)
    if verdict.status == "finding" and not varied and not stop and run.engine.name == "simulated":
        verdict = _with_more(found, verdict, count, roots)
    return replace(verdict, seconds=time.monotonic() - started).bounded()


def _with_more(found: Exploration, verdict: Verdict, count: int, roots: int) -> Verdict:
    """``verdict`` with findings of other roots among the cases that are left, at most ``roots`` in all."""
    assert verdict.finding is not None
    seen, codes, ended = [KnownRoot(verdict.finding)], [verdict.exit_code], ""
    while not ended and len(seen) < 2 * roots and len(grouped(one.finding for one in seen)) < roots:
        on = found.behind(*seen)
        stop = on.explore(count)
        if stop is None and on.broken is None:
            break
        if stop is None:
            on.look_further()
        else:
            ended = wording.ended_behind(on, stop)
        told = wording.verdict(on, stop)  # what was met stands, whatever ended its shrinking
        codes.append(told.exit_code)
        if told.finding is not None:
            seen.append(KnownRoot(told.finding))
    alike = {id(one.finding): len(one.alike) for one in seen}
    groups = grouped(one.finding for one in seen)
    first, *behind = (
        replace(group[0], alike=len(group) - 1 + sum(alike[id(one)] for one in group)) for group in groups
    )
    first = replace(first, note="; ".join(filter(None, (first.note, ended))))
    return replace(wording.broken(found, first, exit_code(codes)), behind=tuple(behind))


def check_case(law: Law, run: Run, case: Case, *, deadline: float | None = None, diagnose: bool = True) -> Verdict:
    """Judge ``law`` on one case, as when a token is replayed. Raises UsageError and NoProgress.

    With ``diagnose``, further cases are drawn on simulated ranks, until ``deadline``: one alone fits several mistakes.
    And the case is run several times, for one that gives other results each time is a finding of its own, if it holds.
    """
    started = time.monotonic()
    sizes = sizes_for(law, WORLD_SIZES["quick"])
    tally = Tally(_limits(run, (case.world_size,)))
    found = Exploration(law, run.watching(law.observe), tally, sizes, None, deadline)
    verdict = _of_one(found, case, diagnose)
    return replace(verdict, seconds=time.monotonic() - started).bounded()


def _of_one(found: Exploration, case: Case, diagnose: bool) -> Verdict:
    """The verdict of one case alone."""
    law, run = found.law, found.run
    run.ran.clear()
    try:
        judge(law, case, run)
    except Violation as violation:
        if found.refused_for_mixing(case):
            return wording.not_supported(found)
        varied = _varied(found, case, run.asked, None) if diagnose else None
        return varied or _broken_by(found, case, violation, diagnose)
    except NotExact as error:
        why = f"the case is outside the exact domain: {error}"
        return Verdict(law.name, run.adapter_ref, "no case", rejected=1, reason=why, exit_code=INTERNAL)
    except Refused as error:
        found.tally.refused[case] = str(error)
        return wording.not_supported(found)
    varied = _varied(found, case, run.asked, None) if diagnose else None
    return varied or Verdict(law.name, run.adapter_ref, "holds", cases=1, left=tuple(run.ran.left))


def _broken_by(found: Exploration, case: Case, violation: Violation, diagnose: bool) -> Verdict:
    found.breaks(case, violation)
    assert found.broken is not None
    if not diagnose:
        return wording.broken(found, found.broken.finding)
    if found.run.engine.name == "simulated":
        found.look_further()
    return wording.diagnosed(found)


def _varied(found: Exploration, case: Case, asked: RunRequest | None, stop: BaseException | None) -> Verdict | None:
    """The finding that ``asked`` of ``case`` gives other results each time; None where it does not.

    It is looked for on processes if it varies on the engine of the run, or if the law did (``stop``).
    """
    if asked is None or not (isinstance(stop, Flaky) or nondeterminism.varies(found.run, asked)):
        return None
    violation = nondeterminism.difference(found.run, asked)
    if violation is None:
        return None
    found.count(case)
    told = finding_of(found.law, found.run, case, violation)
    return wording.broken(found, replace(told, kind="undetermined", engine="processes", place=""))


def _not_asked(law: Law, run: Run, asked: tuple[int, ...]) -> Verdict | None:
    """What is said of a law of which no case is drawn on the numbers of ranks ``asked``; None where some are."""
    features, sizes, vain = run.features, sizes_for(law, asked), ""
    reason = law.not_promised(run.declared.features) or _avoided(law, run)
    if not reason and law.on_real_ranks and run.engine.name == "simulated":
        return Verdict(law.name, run.adapter_ref, "not asked", reason=_SIMULATED_ALONE)
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
    features, own = run.features, run.own
    avoided, own_optimizer = run.declared.features.accepts - features.accepts, own is not None and bool(own.optimizer)
    few = own is not None and features.arithmetic.compute == "bfloat16"
    return coverage.Limits(
        features.accepts, world_sizes, avoided, own is not None, features.axes, own_optimizer, few_bits=few
    )


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
    return own_drawing.not_accepted(law.draw, run.features, world_sizes, run.own, gives_classes(run.own))
