"""Causes of wrong updates by Adam, whose bias correction counts steps: it counts others than a single device's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fsdpcheck.diagnosis import other_updates
from fsdpcheck.diagnosis.cause_fit import differs, mentions
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer


def updated(answer: Answer, step: int, got: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Causes whose parameters after ``step`` are ``got``, bit for bit, wherever these differ from the right ones."""
    wanted = answer.steps[step]
    if answer.case.step.optimizer.kind not in ("adam", "adamw"):
        return
    wrong = [name for name in differs(got, wanted.after) if name in wanted.used]
    right = _counts(answer, step)
    for count in range(1, step + 2) if wrong else ():
        found = _with_count(answer, step, wrong, count)
        if all(_stands_there(got[name], wanted.after[name], found[name]) for name in wrong):
            own = ", ".join(sorted({str(right[name]) for name in wrong}))
            text = f"Adam's bias correction of {mentions(wrong)} counts {count} steps, a single device's counts {own}"
            yield Cause("counted steps", text)


def _stands_there(got: Tensor, right: Tensor, other: Tensor) -> bool:
    """Whether what differs from the right values is what another count gives; a rank may have only a part of it."""
    return bool(((got == right) | (got == other)).all())


def _counts(answer: Answer, step: int) -> dict[str, int]:
    """How many steps up to ``step`` the single device has taken with each parameter."""
    names = answer.steps[step].used
    return {name: sum(name in one.used for one in answer.steps[: step + 1]) for name in names}


def _with_count(answer: Answer, step: int, names: Sequence[str], count: int) -> Mapping[str, Tensor]:
    """Parameters after ``step`` if its bias correction counted so many steps, and moments were the right ones."""
    found = other_updates.after(
        answer, step, lambda optimizer, parameters: _count(optimizer, [parameters[name] for name in names], count - 1)
    )
    return {name: found[name] for name in names}


def _count(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], count: int) -> None:
    """Give Adam's state of these another count; a state that is not there yet has moments of zero."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        for moment in ("exp_avg", "exp_avg_sq"):
            state.setdefault(moment, torch.zeros_like(parameter, memory_format=torch.preserve_format))
        state["step"] = torch.tensor(float(count))
