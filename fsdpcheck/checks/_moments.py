"""Moments that a check looks at: each must have been announced, in every step and on every rank, or nothing was seen.

Announcing is optional, so an adapter that leaves a moment out would otherwise hold by what nobody looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from fsdpcheck.adapters.vocabulary import MOMENTS, PROMISES, Moment
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._read import completed
from fsdpcheck.errors import AdapterError, explain
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Probe

OF_PADDING: tuple[Moment, ...] = PROMISES["padding.zero"].moments
OF_UNITS: tuple[Moment, ...] = PROMISES["lifecycle"].moments


def require_announced(execution: Execution, probe: Probe, moments: Sequence[Moment]) -> None:
    """Every step of every rank announced ``moments`` as often as the case has them. ``probe`` speaks at each.

    So do after_init, before the first step, and after_step, which the harness itself announces. More often is allowed.
    Raises AdapterError where one is missing.
    """
    case, steps = execution.request.training, execution.request.training.step.steps
    due = {moment: _times(case, moment) for moment in moments}
    for result in completed(execution):
        told = Counter((moment, step) for moment, step, _ in probe.saw(result))
        wanted = {("after_init", -1): 1, **{("after_step", step): 1 for step in range(steps)}}
        wanted |= {(moment, step): count for step in range(steps) for moment, count in due.items()}
        for (moment, step), count in wanted.items():
            if told[moment, step] < count:
                where = f"step {step}, rank {result.rank}"
                raise _missing(execution.request.adapter, moment, (told[moment, step], count), where, told)


def require_gradients(execution: Execution, probe: Probe) -> None:
    """Wherever gradients are reduced, shards() showed one for everything that is trained.

    Raises Violation for one that is missing, and AdapterError where no rank ever shows any.
    """
    seen = [(rank.rank, *own) for rank in completed(execution) for own in probe.saw(rank)]
    missing = [entry for entry in seen if isinstance(entry[-1], probes.Missing)]
    for rank, moment, step, found in missing:
        got, wanted = f"gradients of {list(found.gradients)} elements", f"of {list(found.trained)} elements"
        where = f"at {moment}, step {step}, rank {rank}"
        if len(missing) == _reductions(seen) and not any(entry[-1].gradients for entry in missing):
            what = "the trainer does not show the gradient of every shard that is trained, at whose padding laws look"
            then = "show each reduced gradient as Shard(..., holds='gradient') and what is frozen as holds='frozen'"
            raise AdapterError(
                explain(
                    what,
                    got=f"{got}, from shards()",
                    wanted=f"{wanted}, as the shards that are trained have",
                    where=where,
                    then=f"{then}, or take the promises padding.* away",
                )
            )
        raise Violation(
            "the gradient of a shard that is trained is missing",
            got=f"{got}, from shards()",
            wanted=f"{wanted}: a gradient of everything that is trained, once it is reduced",
            where=where,
        )


def _reductions(seen: Sequence[tuple[int, str, int, object]]) -> int:
    """Of what a probe of padding saw, how often that was where gradients are reduced."""
    return sum(moment in OF_PADDING for _, moment, _, _ in seen)


def _times(case: TrainingCase, moment: Moment) -> int:
    """How often a step has this moment at least; 0 for what only a private step has, in a plain one."""
    step, row = case.step, MOMENTS[moment]
    if row.private and not step.private:
        return 0
    of_reductions = step.micro_batches if step.sync_every else 1
    return {"micro-batch": step.micro_batches, "reduction": of_reductions, "step": 1}[row.once]


def _missing(
    adapter: str, moment: str, counts: tuple[int, int], where: str, told: Collection[tuple[str, int]]
) -> AdapterError:
    """``counts``: got, wanted; ``told``: what the rank has announced, (moment, step)."""
    announced = ", ".join(dict.fromkeys(name for name, _ in told))
    if moment not in MOMENTS:
        then = "this is an error of fsdpcheck, which announces it by itself: report it"
    else:
        then = f"call setup.notify({moment!r}, trainer) there (see fsdpcheck.adapter.Moment), or take the promise away"
    what = f"adapter {adapter!r} does not announce every moment at which a law that it promises looks"
    got = f"announcements of {moment}: {counts[0]}; in the whole run this rank announced {announced}"
    wanted = f"announcements of {moment}: {counts[1]} or more, since the law looks at nothing else"
    return AdapterError(explain(what, got=got, wanted=wanted, where=where, then=then))
