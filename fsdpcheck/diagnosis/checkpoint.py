"""Causes of a wrong training after a checkpoint: the parts of its state that did not come back.

Legend: k the step that went wrong, the first after a stop that did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fsdpcheck.case import TrainingCase
from fsdpcheck.diagnosis import shards, stale_state
from fsdpcheck.diagnosis.cause_fit import fits, mentions
from fsdpcheck.diagnosis.other_updates import Change, Parameters, after
from fsdpcheck.findings.cause import EXACT, PATTERN, Cause, Causes
from fsdpcheck.oracle import Answer, Named
from fsdpcheck.program import NO_VALUE
from fsdpcheck.workload.clip_groups import is_instrument
from fsdpcheck.workload.optimizer import at_step, project_
from fsdpcheck.workload.user_model import own_optimizer

_OF_SGD, _OF_ADAM = ("momentum_buffer",), ("step", "exp_avg", "exp_avg_sq")
_STATES = {"sgd": _OF_SGD, "adam": _OF_ADAM, "adamw": _OF_ADAM, "newton_schulz": (), "row_scaled": ()}
"""What optimizers keep of each parameter, by kind; a user's own may have any of it."""
Shown = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
"""(gradients, parameters after it) of a step."""


def of_update(answer: Answer, step: int, got: Mapping[str, Tensor]) -> Causes:
    """Causes of parameters after step k, whose gradients and parameters before are right."""
    found = [cause for cause, value in _updates(answer, step) if _fits(answer, step, value, got)]
    return found or [
        Cause(
            "state not restored",
            "the optimizer's state, with its hyperparameters, did not come back as it was saved",
            PATTERN,
        )
    ]


def with_noise(answer: Answer, never: Sequence[Shown]) -> Answer:
    """The answer of a training with noise, whose gradients and updates are those shown by one that never stopped."""
    start, steps = answer.steps[0].before, []
    for k, (own, (gradients, parameters)) in enumerate(zip(answer.steps, never, strict=True)):
        before = _projected(answer.case, start, never[k - 1][1]) if k else start
        used, shown = {name: gradients[name] for name in own.used}, {name: parameters[name] for name in own.after}
        steps.append(replace(own, before=before, used=used, after=shown))
    return replace(answer, steps=tuple(steps))


def of_noise(answer: Answer, step: int, never: Sequence[Shown], got: Mapping[str, Tensor]) -> Causes:
    """Causes of noisy gradients ``got`` after a stop before step k; ``never``: of a training that never stopped."""
    clean = stale_state.at(answer, step, _projected(answer.case, answer.steps[0].before, never[step - 1][1]))
    first = {name: never[0][0][name].double() - value.double() for name, value in answer.steps[0].used.items()}
    drawn = {name: got[name].double() - value for name, value in clean.items()}
    room = 2.0**-30 if answer.case.arithmetic.dtype == "float64" else 2.0**-12  # of what adding to a gradient rounds
    if all(bool(((drawn[n] - z).abs() <= room * (z.abs() + clean[n].abs())).all()) for n, z in first.items()):
        text = "the step counter did not come back: the noise of the first step, an earlier step, is used again"
        return [Cause("noise again", text)]
    if not any(bool(value.any()) for value in _differences(got, never[step][0])):
        return []
    return [
        Cause(
            "other noise",
            "the state of the noise, its key and its counter, did not come back: it is other noise",
            PATTERN,
        )
    ]


def of_gathered(answer: Answer, step: int, got: Named) -> Causes:
    """Causes of gradients ``got`` at step k, after a load into a trainer that had evaluated before."""
    now, case = answer.steps[step].before, answer.case
    root = shards.units(case, list(now)).get(shards.ROOT, ())
    for names in (now.keys(), root):
        old = {name: torch.full_like(value, NO_VALUE) if name in names else value for name, value in now.items()}
        stale = stale_state.at(answer, step, old)
        if all(not value.numel() or fits(case, got[name], value) for name, value in stale.items() if name in got):
            text = "parameters that an evaluation had gathered before the load stayed as they were"
            return [Cause("gathered before a load", text)]
    return []


def of_loaded(loading: Answer, saving: Answer, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Causes:
    """Causes of parameters that are not what ``saving`` wrote when they are loaded, before any step."""
    wrong = {name: got[name] != value for name, value in wanted.items()}
    if kept := [name for name, mask in wrong.items() if bool(mask.any())]:
        blank = {name: torch.full_like(got[name], NO_VALUE) for name in kept}
        if all(torch.equal(got[name], value) for name, value in blank.items()):
            frozen = "frozen " * (not {*kept} & {*loading.trainable})
            return [Cause("not loaded", f"{frozen}parameters are not loaded: they keep what the new model has")]
    ways = (shards.owners(own.case, wanted, own.trainable) for own in (saving, loading))
    strengths = [_only_one_writer(wrong, old, new) for old, new in zip(*ways, strict=True)]
    text = (
        "of what a rank loads only the part that one rank wrote is read,"
        f" although {saving.case.world_size} ranks wrote it"
    )
    return [Cause("one writer read", text, strength) for strength in strengths if strength is not None]


def of_read(saving: Answer, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Causes:
    """Causes of parameters that an ordinary model has otherwise than ``saving`` wrote them; NaN is what none read."""
    wrong = {name: got[name] for name, value in wanted.items() if name in got and bool((got[name] != value).any())}
    frozen = "frozen " * (not {*wrong} & {*saving.trainable})
    if wrong and all(bool(value.isnan().all()) for value in wrong.values()):
        text = f"{frozen}parameters are in no file of the checkpoint, or are not read: {mentions([*wrong])}"
        return [Cause("not read", text)]
    if wrong and not any(bool(value.any()) for value in wrong.values()):
        return [Cause("zeros saved", f"{frozen}parameters are zero in the checkpoint: {mentions([*wrong])}")]
    return []


def _only_one_writer(wrong: Named, old: Named, new: Named) -> int | None:
    """EXACT if just the elements are wrong that another rank wrote than the first of their piece's.

    PATTERN if pieces that several ranks wrote are wrong and those that one wrote, of which there are some, are right:
    a piece of several rows may be read in several parts. Else None.
    """
    first_only, several, alone = True, False, 0
    for name, mask in wrong.items():
        for piece in (new[name] == shard for shard in set(new[name].flatten().tolist())):
            others = piece & (old[name] != old[name][piece].min())
            if bool((mask & piece & ~others).any()):
                first_only = False
            if bool(others.any()):
                several |= bool((mask & piece).any())
            elif bool((mask & piece).any()):
                return None
            else:
                alone += 1
    if first_only and several:
        return EXACT
    return PATTERN if several and alone else None


def _updates(answer: Answer, step: int) -> Iterator[tuple[Cause, Named]]:
    """(cause, parameters after step k) of an optimizer that lost one part of its state, or all of it."""
    spec = answer.case.step.optimizer
    lost: dict[str, tuple[str, Change]] = {
        "all": ("the optimizer's state did not come back: the update is that of a new optimizer", _cleared)
    }
    for key in _STATES.get(spec.kind, (*_OF_SGD, *_OF_ADAM)):
        lost[key] = (f"of the optimizer's state {key} did not come back", _zeroed(key))
    for key, (text, change) in lost.items():
        yield Cause(f"state lost: {key}", text), after(answer, step, change)
    if spec.schedule != "constant":
        text = "the learning rate's schedule did not come back: the optimizer's state has the rate of the first step"
        yield Cause("schedule lost", text), after(answer, step, _with_rate(answer))


def _cleared(optimizer: torch.optim.Optimizer, _: Parameters) -> None:
    for one in own_optimizer.parts(optimizer):
        one.state.clear()


def _zeroed(key: str) -> Change:
    def change(optimizer: torch.optim.Optimizer, _: Parameters) -> None:
        for state in (state for one in own_optimizer.parts(optimizer) for state in one.state.values()):
            if key in state and state[key] is not None:
                state[key] = torch.zeros_like(state[key])

    return change


def _with_rate(answer: Answer) -> Change:
    def change(optimizer: torch.optim.Optimizer, _: Parameters) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 2.0 ** -at_step(answer.case.step.optimizer, 0).lr_exponent

    return change


def _fits(answer: Answer, step: int, value: Named, got: Mapping[str, Tensor]) -> bool:
    """Whether that gives the parameters got, and other ones than the right ones."""
    case, right = answer.case, answer.steps[step].after
    body = [name for name in value if not is_instrument(name) and name in got and value[name].numel()]
    told = all(fits(case, got[name], value[name]) for name in body)
    return told and not all(fits(case, right[name], value[name]) for name in body)


def _projected(case: TrainingCase, frozen: Named, shown: Mapping[str, Tensor]) -> Named:
    """The parameters that a step starts from, of those shown after the one before."""
    found = {name: shown.get(name, value).clone() for name, value in frozen.items()}
    if case.arithmetic.project:
        project_(found.values(), case)
    return found


def _differences(got: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Iterator[Tensor]:
    return (got[name] != value for name, value in other.items())
