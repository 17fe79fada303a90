"""Ranks on GPUs against ranks on the CPU: equal bits, laws, the order of streams, hangs, and what a GPU may round.

Each row is measured on every kind of ranks that the machine has (engines/_common/metal.py), and names those that it has
not. On the CPU the same rows run on simulated ranks and on processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from fsdpcheck import engines
from fsdpcheck.engines._common import metal

_WITNESSES: Final = Path(__file__).parent.parent / "tests" / "witnesses.json"
_LARGEST_WORLD: Final = 4
_ADAPTERS: Final = ("reference", "fully_shard")
_JUDGED: Final = ("reference", "fully_shard", "ddp")
_LAWS: Final = ("training.plain", "training.gradients", "norms.distributed-complete", "clipping.sum", "noise.once",
                "global-norm.update", "state.resumed", "lifecycle.memory", "features.checkpointing")  # fmt: skip
_KINDS: Final = {"cuda": ("simulated-cuda", "gloo-cuda", "nccl"), "cpu": ("simulated", "processes")}
_CYCLES: Final = 200_000_000
"""Of a GPU that sleeps: about a tenth of a second."""


class Skipped(Exception):
    """What a row says when it cannot be measured here."""


def _on_each(device: str, measure: Callable[[str], Iterator[str]], ranks: int = 1) -> list[str]:
    """What is measured on each kind of ranks, or why there are none. Raises Skipped where there is none at all."""
    told, measured = [], False
    for kind in _KINDS[device]:
        if lacks := metal.of(kind).lacks(ranks):
            told.append(f"{kind}: skipped, {lacks}")
            continue
        measured = True
        told += [f"{kind}: {line}" for line in measure(kind)]
    if not measured:
        raise Skipped("; ".join(told))
    return told


def switched(device: str) -> list[str]:
    """What a GPU may round, as torch has it and in a run; a product whose terms have 20 bits is exact in that."""
    from fsdpcheck.case import LayerSpec, ModelSpec, TrainingCase
    from fsdpcheck.workload import numerics

    told = [f"as torch has them: {_named(numerics.switches())}"]
    case = TrainingCase(ModelSpec((LayerSpec(2),)))
    exact = torch.full((8, 8), 1 + 2.0**-19, device=device)
    with numerics.of(case):
        told.append(f"in a run: {_named(numerics.switches())}")
        product = exact @ torch.eye(8, device=device)
    if not torch.equal(product, exact):
        raise RuntimeError("a product in float32 lost bits though TF32 is off")
    return [*told, "afterwards as before" if told[0].endswith(_named(numerics.switches())) else "NOT PUT BACK"]


def _named(switches: dict[str, bool]) -> str:
    return ", ".join(f"{name} {'on' if on else 'off'}" for name, on in switches.items())


def equal_bits(device: str) -> list[str]:
    """Each witness of a planted fault, without the fault, on each kind of ranks and on simulated ones on the CPU.

    Parameters are compared where SGD makes them. Adam divides by a root, and what it makes of equal gradients was
    rounded otherwise on an H200; from its second step on gradients are of other parameters.
    """
    return _on_each(device, _equal_on)


def _equal_on(kind: str) -> Iterator[str]:
    most = min(metal.of(kind).most_ranks or _LARGEST_WORLD, _LARGEST_WORLD)
    differing: list[str] = []
    with closing(engines.open_engine("simulated")) as here, closing(engines.open_engine(kind)) as there:
        for adapter in _ADAPTERS:
            yield _compared(adapter, here, there, most, differing)
    if differing:
        raise RuntimeError(f"{len(differing)} cases differ on {kind} ranks:\n" + "\n".join(differing[:10]))


def _compared(adapter: str, here: Any, there: Any, most: int, differing: list[str]) -> str:
    from fsdpcheck.judging.run import Run

    one, other = Run(here, adapter), Run(there, adapter)
    compared = adam = 0
    for number, case in enumerate(_cases(one, most)):
        right = one(case, {"params", "grads"})
        if right.failure is not None:  # a case that is there to be refused
            continue
        compared, adam = compared + 1, adam + (not _sgd(case))
        found = _difference(right, other(case, {"params", "grads"}), 0 if _sgd(case) else 1)
        differing += [f"{adapter}, case {number}: {found}; {case.to_json()}"] if found else []
    said = (
        f"{adapter}: {compared} cases on at most {most} ranks, gradients and parameters of every rank and step compared"
    )
    return f"{said}; of {adam} with Adam gradients of the first step alone"


def _cases(run: Any, most: int) -> Iterator[Any]:
    """Exact cases that the adapter accepts, of the witnesses, on at most so many ranks."""
    from fsdpcheck.case import TrainingCase
    from fsdpcheck.errors import FsdpcheckError
    from fsdpcheck.findings.tokens import decode
    from fsdpcheck.oracle import standards

    if not _WITNESSES.is_file():
        raise Skipped("only a checkout has the cases of tests/witnesses.json")
    found: set[Any] = set()
    for token in json.loads(_WITNESSES.read_text(encoding="utf-8")).values():
        case = decode(token).case
        if not isinstance(case, TrainingCase) or case.world_size > most or not case.requires() <= run.features.accepts:
            continue
        if case in found or not standards.every_bit(run.tier(case)):
            continue
        try:
            run.answer(case)
        except FsdpcheckError:  # not exact, or not for this law
            continue
        found.add(case)
        yield case


def _sgd(case: Any) -> bool:
    return bool(case.step.optimizer.kind == "sgd")


def _difference(one: Any, other: Any, gradients: int) -> str:
    """Where two executions of a case differ; "" if nowhere. ``gradients``: of so many steps no more; 0 for all."""
    if other.failure is not None:
        return f"{other.failure.kind}: {other.failure.text.splitlines()[0]}"
    for mine, theirs in zip(one.ranks, other.ranks, strict=True):
        steps = list(zip(mine.steps, theirs.steps, strict=True))
        for step, (here, there) in enumerate(steps[: gradients or None]):
            parameters = ("parameter", {} if gradients else here.params, there.params)
            for what, values, others in (("gradient", here.grads, there.grads), parameters):
                for name, value in values.items():
                    if not torch.equal(value, others[name].to(value.device)):
                        return f"{what} {name} of rank {mine.rank} in step {step}"
    return ""


def streams_are_ordered(device: str) -> list[str]:
    """A rank whose GPU is still busy when it issues a call: the others take what it computes, not what was there."""
    if device != "cuda":
        raise Skipped("the processors have no streams; tests/simulation/test_rank_streams.py plays them")
    from fsdpcheck.simulation.simulate import Options, simulated

    def program() -> float:
        dist.init_process_group("nccl")
        value = torch.zeros(1 << 20, device="cuda")
        if dist.get_rank() == 1:
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        value += dist.get_rank() + 1
        dist.all_reduce(value)
        return float(value.sum()) / value.numel()

    done = simulated(program, 3, (), {}, Options(show=False, on_gpu=True))
    if done.failure is not None or done.returned != (6.0, 6.0, 6.0):
        raise RuntimeError(f"got {done.returned}, wanted 6 on each rank; {done.failure}")
    return ["3 ranks on a stream each, one of them late: all have the sum"]


def laws_hold(device: str) -> list[str]:
    """Laws on each kind of ranks, in the profile quick."""
    return _on_each(device, _judged_on)


def _judged_on(kind: str) -> Iterator[str]:
    from fsdpcheck.judging.check import check_law
    from fsdpcheck.judging.registry import chapters
    from fsdpcheck.judging.run import Run

    known = chapters()
    with closing(engines.open_engine(kind)) as engine:
        for adapter in _JUDGED:
            run, begun = Run(engine, adapter), time.monotonic()
            laws = [known[name] for name in _LAWS if name in known and not known[name].not_promised(run.features)]
            verdicts = [check_law(law, run, "quick") for law in laws]
            if found := [verdict for verdict in verdicts if verdict.finding is not None]:
                raise RuntimeError("\n".join(f"{one.law} on {kind}: {one.finding.token}" for one in found))  # type: ignore[union-attr]
            seconds = time.monotonic() - begun
            counted = ", ".join(f"{verdict.law} {verdict.status} {verdict.cases}" for verdict in verdicts)
            yield f"{adapter}: {sum(one.cases for one in verdicts)} cases in {seconds:.0f} s: {counted}"


def hangs_are_told(device: str) -> list[str]:
    """From the last possible move of real ranks to the report, on two of them."""
    return _on_each(device, _hangs_on, 2)


def _hangs_on(kind: str) -> Iterator[str]:
    from benchmarks import metal as real

    if metal.is_simulated(kind):
        yield "no rank waits for a clock; `python -m benchmarks deadlocks`"
        return
    with closing(engines.open_engine(kind)) as engine:
        yield from real.on_processes(engine, 2)
