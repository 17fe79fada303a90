"""Reading an Execution: what was recorded, by step and rank, with a clear error for what was not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._compare import first_index, number
from fsdpcheck.diagnosis.collectives import of_failure
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult
from fsdpcheck.findings.cause import Cause
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.program import probes
from fsdpcheck.workload import batches

Field = Literal["grads", "norms", "factors", "grad_norm"]


def completed(execution: Execution) -> list[RankResult]:
    """The ranks of a run that took every step and shows numbers; else raises Violation, with the failure's report."""
    case, failure = execution.request.case, execution.failure
    wanted = case.step.steps if isinstance(case, TrainingCase) else 0
    if failure is not None:
        stood = ", ".join(f"rank {state.rank} {state.state}" for state in failure.ranks) or "unknown"
        cause = partial(of_failure, execution) if isinstance(case, TrainingCase) else ""
        raise Violation(
            "the run did not complete", got=failure.text, wanted="all ranks finish", where=stood, cause=cause
        )
    for result in execution.ranks:
        if len(result.steps) != wanted:
            raise Violation(
                "a rank did not take every step",
                got=f"{len(result.steps)} steps",
                wanted=f"{wanted} steps",
                where=f"rank {result.rank}",
            )
        for step, record in enumerate(result.steps):
            if record.hidden:
                raise Violation(
                    "a rank shows parameters that are not its own",
                    got="its own copy differs from what it showed",
                    wanted="parameters() from this rank's own state: projection between steps would heal what differs",
                    where=f"step {step}, rank {result.rank}, {record.hidden}",
                )
    if len(execution.ranks) != case.world_size:
        got, world = len(execution.ranks), case.world_size
        raise Violation("ranks are missing", got=f"{got} ranks", wanted=f"{world} ranks", where="the run as a whole")
    require_numbers(execution)
    return execution.ranks


def require_numbers(execution: Execution) -> None:
    """Raise Violation at the first NaN or infinity that a rank reported, unless the run itself wrote NaN somewhere.

    NaN equals NaN, and infinity itself: a law that compares two runs would hold on runs of nothing else.
    """
    if probes.poison_padding.was_in(execution.request) or execution.request.spoiled:
        return
    for result in execution.ranks:
        for where, value in _reported(result):
            if bool(value.isfinite().all()):
                continue
            wrong = ~value.isfinite()
            index = first_index(wrong)
            raise Violation(
                "a reported value is not finite",
                got=number(value[index]),
                wanted="a number",
                where=f"rank {result.rank}, {where}{list(index) if index else ''}; {int(wrong.sum())} of"
                f" {wrong.numel()} elements",
            )


def _reported(result: RankResult) -> Iterator[tuple[str, Tensor]]:
    """(where, value) of everything a rank reported, in the order in which it did."""
    yield from ((f"before the first step, {name}", value) for name, value in result.initial.items())
    for k, step in enumerate(result.steps):
        vectors = {"norms": step.norms, "clip factors": step.factors, "global norm": step.grad_norm}
        yield from ((f"step {k}, {name}", value) for name, value in vectors.items() if value is not None)
        yield from ((f"step {k}, gradient of {name}", value) for name, value in (step.grads or {}).items())
        yield from ((f"step {k}, {name}", value) for name, value in step.params.items())
        yield from ((f"step {k}, saved, {name}", value) for name, value in (step.saved or {}).items())
        yield from ((f"step {k}, loaded, {name}", value) for name, value in (step.loaded or {}).items())


def shows(execution: Execution, step: int, field: Field) -> bool:
    """Whether every rank recorded ``field`` at ``step``."""
    return all(getattr(result.steps[step], field) is not None for result in execution.ranks)


def recorded(execution: Execution, step: int, field: Field) -> Iterator[tuple[int, Any]]:
    """(rank, value) of ``field`` at ``step``. Raises UsageError when the run did not record it."""
    for result in execution.ranks:
        value = getattr(result.steps[step], field)
        if value is None:
            raise UsageError(f"the run recorded no {field} (rank {result.rank}, step {step}); next: observe {field!r}")
        yield result.rank, value


def poisoned(execution: Execution, got: Mapping[str, Tensor], otherwise: Diagnose) -> Diagnose:
    """A diagnosis that knows why there is NaN in ``got``, if the run filled padding with it; else ``otherwise``."""
    if not probes.poison_padding.was_in(execution.request) or not any(bool(v.isnan().any()) for v in got.values()):
        return otherwise
    text = "padding is read: the NaN that was written into it came out"
    return lambda: [Cause("padding is read", text)]


def local_samples(case: TrainingCase, step: int, rank: int) -> tuple[int, ...]:
    """Global indices of a rank's samples at one step, in the order of its micro-batches."""
    return tuple(index for chunk in batches.indices(case, step)[rank] for index in chunk)


def local_rows(case: TrainingCase, step: int, rank: int, samples: tuple[int, ...]) -> list[int]:
    """Places in ``samples`` of a rank's samples, in the order of its micro-batches."""
    place = {sample: row for row, sample in enumerate(samples)}
    return [place[index] for index in local_samples(case, step, rank)]


def pick(values: Tensor, rows: list[int]) -> Tensor:
    """``values`` [n, ...] at ``rows``; works for none."""
    return values[rows] if rows else values[:0]
