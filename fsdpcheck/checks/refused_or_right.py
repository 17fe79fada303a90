"""Checks of cases that an implementation may refuse, and has to compute right where it does not.

A weight of two sharding units: each shards what it finds in its modules, and gathers and frees it by itself, so that it
is either theirs together, or two weights from the first step on.
A layer on one row for all samples, as a learned table of positions may be: what reaches it in the backward is summed
over the samples already, and no norm follows from it.
A weight that is used beside its layer: what reaches the layer in the backward is not all of its gradient.
A layer that is thawed between two steps: what was taken note of when the model was sharded - which gradients to expect,
to reduce, to give room to - is otherwise from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import assert_norms_exact
from fsdpcheck.checks.refused_samples import refused
from fsdpcheck.checks.training import assert_parameters_equal, right
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import PATTERN, Cause, Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer


class Doubtful(NamedTuple):
    """``without``: the case without what may be refused. ``cause``: of what is wrong with it and right without it."""

    without: Callable[[TrainingCase], TrainingCase]
    cause: str


TIED_APART: Final = Doubtful(
    lambda case: replace(case, model=replace(case.model, tied=None)),
    "each unit keeps a parameter of its own of a weight that two share: refuse it, or give it to a unit around both",
)
THAWED: Final = Doubtful(
    lambda case: replace(case, step=replace(case.step, thaws=False, refreezes=False)),
    "what is thawed behind the first step is treated as before, or what is frozen again behind the second: look at"
    " requires_grad in each step, or refuse",
)
USES: Final = Doubtful(
    lambda case: replace(
        case,
        model=replace(case.model, layers=tuple(replace(layer, used="once") for layer in case.model.layers)),
        step=replace(case.step, across="nothing"),
    ),
    "",
)
Run = Callable[[TrainingCase], tuple[Execution, Answer]]


def assert_refused_or_trained(run: Run, case: TrainingCase, what: Doubtful) -> None:
    """Some rank raised, whatever it is called, or parameters are the single device's after every step, bit for bit.

    What is raised without ``what`` too refuses nothing.
    """
    execution, answer = run(case)
    if refused(execution, lambda: run(what.without(case))[0]):
        return
    try:
        assert_parameters_equal(execution, answer)
    except Violation as found:
        diagnose = found.diagnose

        def causes() -> Causes | None:
            known = diagnose() if diagnose is not None else None
            here = [Cause(what.cause, what.cause, PATTERN)] if right(*run(what.without(case))) else []
            return [*(known or ()), *here] or known

        said = found.cause if diagnose is None else ""
        raise Violation(
            found.what, got=found.got, wanted=found.wanted, where=found.where, cause=said or causes
        ) from None


def assert_refused_or_norms(run: Run, case: TrainingCase) -> None:
    """Some rank raised, whatever it is called, or the norms are the exact ones, bit for bit or as the rule bounds.

    What is raised where each layer runs once, on each sample, refuses nothing.
    """
    execution, answer = run(case)
    if not refused(execution, lambda: run(USES.without(case))[0]):
        assert_norms_exact(execution, answer)
