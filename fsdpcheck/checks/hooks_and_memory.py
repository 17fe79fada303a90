"""Checks of what probes saw of hooks, memory, copies and interruptions (see program/probes)."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fsdpcheck.checks._compare import require_equal
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.training import assert_parameters_equal, right
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import Cause
from fsdpcheck.findings.violation import Violation
from fsdpcheck.oracle import Answer
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Notes, Probe
from fsdpcheck.workload import batches, models, numerics
from fsdpcheck.workload.optimizer import project_

_UNSEEN = "gradients are put where autograd does not see them"
_LEFT_BEHIND = "the training is right where nothing is interrupted: a step that raised leaves something behind"
Hook = tuple[str, str]
"""(kind, module)."""


def assert_hooks_fire(execution: Execution) -> None:
    """In every step, on every rank, each hook of each module fires as often as on a single device."""
    for rank, step, noted in _by_step(execution, probes.hook_calls):
        got, wanted = Counter(noted), _hooks_of_one_device(execution, step, rank)
        for kind, module in sorted({*got, *wanted}):
            if got[kind, module] != wanted[kind, module]:
                raise Violation(
                    "hooks do not fire as on a single device",
                    got=f"the {kind} hook of {module or 'the model'} fired {got[kind, module]} times",
                    wanted=f"{wanted[kind, module]} times",
                    where=f"step {step}, rank {rank}",
                    cause=_of_calls(got[kind, module], wanted[kind, module]),
                )


def assert_parameter_hooks_fire(execution: Execution, without_gradient: Sequence[int]) -> None:
    """Post-accumulate hooks of each trained parameter fire once for every reduction of gradients.

    Of so many parameters ``without_gradient``, step by step, on the single device they may not fire at all.
    """
    spec = execution.request.training.step
    wanted = spec.micro_batches if spec.sync_every else 1
    for result in completed(execution):
        if not (counts := [value for _, at, value in probes.accumulations.saw(result) if at < 0]):
            raise UsageError("the run noted no parameters; next: run it with probes.accumulations")
        if not sum(counts):
            raise Violation("no optimizer has a trained parameter", got="0 parameters", wanted="at least one",
                            where=f"rank {result.rank}", cause="gradients are put where autograd does not see them",
                            )  # fmt: skip
        for step in range(len(result.steps)):
            fired = Counter(value for _, at, value in probes.accumulations.saw(result) if at == step)
            silent = [number for number in range(sum(counts)) if not fired[number]]
            may_be = silent if len(silent) <= without_gradient[step] else []
            for number in range(sum(counts)):
                if fired[number] != wanted and number not in may_be:
                    raise Violation("hooks on parameters do not fire once a reduction",
                                    got=f"the hook of parameter {number} of the optimizer fired {fired[number]} times",
                                    wanted=f"{wanted} times", where=f"step {step}, rank {result.rank}",
                                    cause="" if fired[number] else _UNSEEN)  # fmt: skip


def assert_steady_memory(execution: Execution) -> None:
    """Between steps parameters lie in as many bytes as before the first; each step has the same peak.

    A step in which a rank runs no layer has none. On a GPU all that is allocated after a step is as much as after the
    first, which makes what lasts: gradients, and the state of the optimizer.
    """
    for rank in completed(execution):
        noted = [(step, *value) for _, step, value in probes.memory.saw(rank)]
        rests = [(step, held) for step, when, held in noted if when == "at rest"]
        if not rests:
            raise UsageError("the run noted no memory; next: run it with probes.memory")
        for step, held in rests:
            if held != rests[0][1]:
                raise Violation("memory is held between steps", got=f"{held} bytes of parameters",
                                wanted=f"{rests[0][1]}, as before the first step",
                                where=f"after step {step}, rank {rank.rank}",
                                cause="a unit is not freed when the step is over")  # fmt: skip
        allocated = [(step, held) for step, when, held in noted if when == "allocated"]
        for step, held in allocated:
            if held != allocated[0][1]:
                raise Violation("a step leaves memory allocated", got=f"{held} bytes on the GPU",
                                wanted=f"{allocated[0][1]}, as after the first step",
                                where=f"after step {step}, rank {rank.rank}",
                                cause="something is kept from step to step")  # fmt: skip
        peaks: dict[int, int] = {}  # none of a step in which the rank, without samples, runs no layer
        for step, when, held in noted:
            if when == "in a step":
                peaks[step] = max(held, peaks.get(step, 0))
        for step, peak in peaks.items():
            if peak != (first := next(iter(peaks.values()))):
                raise Violation("memory changes from step to step", got=f"{peak} bytes of parameters at most",
                                wanted=f"{first}, as in the first step", where=f"step {step}, rank {rank.rank}",
                                cause="a unit is not freed, or not always at the same time")  # fmt: skip


def assert_copies(execution: Execution) -> None:
    """Writing into what the trainer has shown changes nothing that it shows next."""
    for rank, step, changed in _after_each_step(execution, probes.scribbled):
        if changed:
            raise Violation("what the trainer shows is what it trains", got=f"writing into it changes {changed[0]}",
                            wanted="copies", where=f"step {step}, rank {rank}",
                            cause="live memory is given away")  # fmt: skip


def assert_loss_kept(execution: Execution) -> None:
    """After every step the loss has what it had when the implementation got it, and nothing more."""
    for rank, step, changed in _after_each_step(execution, probes.loss_kept):
        if changed:
            raise Violation("the user's loss is changed", got=f"another {', '.join(changed)}",
                            wanted="the loss as it was given", where=f"after step {step}, rank {rank}",
                            cause="what a step does to the loss is not undone: use a copy of it")  # fmt: skip


def _after_each_step(execution: Execution, probe: Probe) -> Iterator[tuple[int, int, Any]]:
    """(rank, step, what the probe noted behind it); raises UsageError where it did not note each step of a rank."""
    for rank in completed(execution):
        seen = [(step, noted) for _, step, noted in probe.saw(rank)]
        if len(seen) != len(rank.steps):
            raise UsageError(f"rank {rank.rank} noted {len(seen)} of {len(rank.steps)} steps;"
                             f" next: run it with probes.{probe.function.__name__}")  # fmt: skip
        yield from ((rank.rank, step, noted) for step, noted in seen)


def interruptions(execution: Execution, probe: Probe) -> int:
    """How often all ranks together were interrupted."""
    return sum(len(probe.saw(rank)) for rank in completed(execution))


def assert_undisturbed(interrupted: Execution, answer: Answer, whole: Callable[[], Execution]) -> None:
    """An interrupted run shows the single device's parameters. If not, ``whole()`` runs it without interruption."""
    try:
        assert_parameters_equal(interrupted, answer)
    except Violation as found:
        if interrupted.failure is not None or not right(whole(), answer):
            raise
        raise Violation(found.what, got=found.got, wanted=found.wanted, where=found.where, cause=_LEFT_BEHIND) from None


def assert_noise_undisturbed(interrupted: Execution, whole: Execution) -> None:
    """An interrupted run with noise shows the parameters of the run that nothing interrupted, bit for bit."""
    for mine, theirs in zip(completed(interrupted), completed(whole), strict=True):
        for step, (got, wanted) in enumerate(zip(mine.steps, theirs.steps, strict=True)):
            what, where = "a step that raised changes what is released with noise", f"step {step}, rank {mine.rank}"
            require_equal(what, got.params, wanted.params, where, _of_interruption)


def _of_interruption() -> list[Cause]:
    return [Cause("interrupted", _LEFT_BEHIND)]


def _of_calls(got: int, wanted: int) -> str:
    """Why a hook of a module fires another number of times."""
    if got < wanted:
        return "a module is computed past its hooks"
    if not wanted:
        return "a module in which nothing needs a gradient has a backward"
    return "a module is computed more than once" if got % wanted == 0 else ""


def _hooks_of_one_device(execution: Execution, step: int, rank: int) -> Counter[Hook]:
    """What fires on a single device that takes a rank's micro-batches, with the parameters that the rank has then.

    Which samples leave a layer out depends on what reaches it.
    """
    case, fired, model = execution.request.training, list[Any](), models.build(execution.request.training)
    if step:
        now = {name: value.clone() for name, value in execution.ranks[rank].steps[step - 1].params.items()}
        if case.arithmetic.project:
            project_(now.values(), case)
        model.load_state_dict(now, strict=False)
    if case.thawed_in(step):
        model.requires_grad_()
    probes.hook_calls(model, Notes(rank, fired.append, lambda: step, lambda told: None, lambda shown: None))
    with warnings.catch_warnings(), numerics.of(case):
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        for micro in batches.batch(case, step, rank, execution.request.instrument).micro_batches:
            torch.autograd.backward(models.loss_for(case)(model(micro.inputs), micro.targets).sum())
    return Counter(fired)


def _by_step(execution: Execution, probe: Probe) -> Iterator[tuple[int, int, list[Any]]]:
    """(rank, step, notes)."""
    for rank in completed(execution):
        for step in range(len(rank.steps)):
            noted = [value for _, at, value in probe.saw(rank) if at == step]
            yield rank.rank, step, noted
