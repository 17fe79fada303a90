"""Judges: what looks at one finished run and says whether it is wrong - laws, and for comparison the usual allclose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fsdpcheck.adapters.contract import Features, Observable
from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.checks._read import local_rows, pick
from fsdpcheck.execution import Execution, StepRecord
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.oracle import StepAnswer

Tier = Literal["exact", "any C", "replay"]
"""exact: every bit. any C: exact norms, factors by their rule, the probe. replay: real numbers, within the theorem."""


@dataclass(frozen=True)
class Judge:
    """``finds(run, execution)``: whether a finished run looks wrong."""

    name: str
    finds: Callable[[Run, Execution], bool]


@dataclass(frozen=True)
class _Finished(Run):
    """A Run whose every execution is the one given: laws are judged on it without running again."""

    execution: Execution | None = None

    def __call__(self, case: Case, *_: object, **__: object) -> Execution:
        assert self.execution is not None
        assert case == self.execution.request.training
        return self.execution


def law_judge(law: Law) -> Judge:
    """The law itself. It must need one run only, and nothing but recorded observables."""

    def finds(run: Run, execution: Execution) -> bool:
        finished = _Finished(run.engine, run.adapter_ref, run.installs, execution=execution)
        try:
            law.body(execution.request.training, finished)
        except Violation:
            return True
        return False

    return Judge(law.name, finds)


def allclose(rtol: float, atol: float) -> Judge:
    """What a test with ``torch.allclose(rtol, atol)`` would say of everything the run recorded."""

    def finds(run: Run, execution: Execution) -> bool:
        if execution.failure is not None:
            return True
        pairs = _pairs(run, execution)
        return not all(a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol, atol) for a, b in pairs)

    return Judge(f"allclose {rtol:g}/{atol:g}", finds)


def watched(features: Features, laws: Iterable[Law], private: bool) -> frozenset[Observable]:
    """What to record so that all ``laws`` and allclose can judge: as much as the adapter shows in such a step."""
    shown: frozenset[Observable] = frozenset({"grads", "norms", "factors"} if private else {"grads"})
    return (shown & features.observables).union(*(law.observe for law in laws), {"params"})


def _pairs(run: Run, execution: Execution) -> Iterator[tuple[Tensor, Tensor]]:
    """(recorded, right) of all that both sides have."""
    case = execution.request.training
    for result in execution.ranks:
        for k, (record, step) in enumerate(zip(result.steps, run.answer(case).steps, strict=True)):
            yield from ((record.params[name], value) for name, value in step.after.items() if name in record.params)
            if record.grads is not None:
                yield from ((record.grads[name], value) for name, value in step.used.items() if name in record.grads)
            yield from _row_pairs(case, k, result.rank, record, step)


def _row_pairs(
    case: TrainingCase, k: int, rank: int, record: StepRecord, step: StepAnswer
) -> Iterator[tuple[Tensor, Tensor]]:
    rows = local_rows(case, k, rank, step.samples)
    if record.norms is not None:
        yield record.norms, pick(step.norms, rows)
    if record.factors is not None:
        yield record.factors, pick(step.factors, rows)
