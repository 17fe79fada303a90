"""How a training starts whose ranks have built other models: what is found, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdpcheck import oracle
from fsdpcheck.adapters.contract import Use
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.checks.features import assert_right
from fsdpcheck.checks.initial_parameters import assert_starts_from_rank_0, assert_starts_unrounded
from fsdpcheck.diagnosis import of_rounded_start, of_start
from fsdpcheck.diagnosis.bits import rounded
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import named
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes

MODEL = ModelSpec((LayerSpec(2), LayerSpec(2), LayerSpec(2)), units=(1, 1))
FLAT = TrainingCase(MODEL, MeshSpec(3), BatchLayout(batch_size=1))
REPLICAS = replace(FLAT, mesh=MeshSpec(2, 2))
COPIES = replace(FLAT, mesh=MeshSpec(1, 2))
CASES = {"flat": FLAT, "replicas": REPLICAS, "copies": COPIES}
BROADCASTING = ("reference", "reference_fsdp2", "fully_shard")


def ran(engine: Engine, adapter: str, case: TrainingCase, *using: Use, fault: str = "") -> Execution:
    installs = (f"fsdpcheck.impl.faults:{fault}",) * bool(fault)
    return Run(engine, adapter, installs)(case, using=using, probes=(probes.start_apart,))


@pytest.mark.parametrize("adapter", BROADCASTING)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_start_apart_unless_rank_0s_values_are_broadcast(
    engine: SimulatedEngine, adapter: str, case: TrainingCase
) -> None:
    """Without the feature nobody makes ranks equal, so that what the law judges is the feature."""
    answer = Run(engine, adapter).answer(case)
    assert_starts_from_rank_0(ran(engine, adapter, case, "broadcast"), answer)
    with pytest.raises(Violation, match="does not start from what rank 0 has built") as found:
        assert_starts_from_rank_0(ran(engine, adapter, case), answer)
    assert "nothing is broadcast from rank 0" in found.value.cause


@pytest.mark.parametrize("adapter", BROADCASTING)
def test_real_ranks_start_from_rank_0s_values_too(adapter: str) -> None:
    processes = ProcessesEngine()
    try:
        execution = ran(processes, adapter, REPLICAS, "broadcast")
        answer = Run(processes, adapter).answer(REPLICAS)
        assert_starts_from_rank_0(execution, answer)
        assert_right(execution, answer)
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("case", "fault", "cause"),
    [
        (REPLICAS, "broadcast_leaves_replicas_out", "replicas other than the first start from what their own"),
        (COPIES, "broadcast_leaves_replicas_out", "replicas other than the first start from what their own"),
        (FLAT, "only_the_root_is_broadcast", "units.0, units.1: each rank keeps"),
        (COPIES, "only_the_root_is_broadcast", "units.0, units.1: each rank keeps"),
        (FLAT, "broadcast_from_the_last_rank", "all ranks start from what rank 2 has built"),
        (REPLICAS, "broadcast_from_the_last_rank", "all ranks start from what rank 3 has built"),
    ],
)
def test_the_cause_is_named(engine: SimulatedEngine, case: TrainingCase, fault: str, cause: str) -> None:
    answer = Run(engine, "reference").answer(case)
    with pytest.raises(Violation) as found:
        assert_starts_from_rank_0(ran(engine, "reference", case, "broadcast", fault=fault), answer)
    assert cause in found.value.cause


HALF = replace(FLAT, arithmetic=Arithmetic("float32", compute="bfloat16"))


@pytest.mark.parametrize("adapter", ["reference", "reference_fsdp2", "fully_shard", "fsdp1"])
def test_parameters_of_many_bits_are_sharded_as_they_are(engine: SimulatedEngine, adapter: str) -> None:
    assert_starts_unrounded(Run(engine, adapter)(HALF, probes=(probes.start_between,)))


def test_shards_of_rounded_copies_are_seen_and_named(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference", ("fsdpcheck.impl.faults:shards_of_copies_in_half_precision",))
    with pytest.raises(Violation, match="starts from rounded parameters") as found:
        assert_starts_unrounded(run(HALF, probes=(probes.start_between,)))
    assert (
        found.value.cause
        == "all parameters were rounded to 8 bits, the precision of bfloat16, before they were sharded"
    )


def test_parameters_that_nobody_changed_or_of_few_bits_are_not_judged(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference")
    with pytest.raises(UsageError, match=r"next: run with .*:start_between"):
        assert_starts_unrounded(run(HALF))
    execution = run(HALF, probes=(probes.start_between,))
    noted = next(one for one in execution.ranks[1].observations if one[0] == probes.start_between.name)
    noted[3]["tail.linear2.weight"][0, 0] = 3.0
    with pytest.raises(UsageError, match="rank 1 has built elements of few bits"):
        assert_starts_unrounded(execution)


def test_what_some_parameters_were_rounded_to_is_told_from_other_values() -> None:
    built = {name: torch.full((2,), 1.5 + 2.0**-9 + 2.0**-15) for name in ("a", "b")}
    assert named(of_rounded_start(built, {"a": built["a"], "b": rounded(built["b"], 11)})).startswith(
        "b were rounded to 11 bits, the precision of float16"
    )
    assert of_rounded_start(built, {"a": built["a"], "b": built["b"] + 1}) == []
    assert of_rounded_start(built, {"a": built["a"]}) == []


def shown(case: TrainingCase) -> tuple[list[oracle.Named], list[oracle.Named]]:
    """What each rank builds, and what each shows of a training that starts right."""
    right = oracle.answer(case).steps[0].before
    built = [{name: value + rank for name, value in right.items()} for rank in range(case.world_size)]
    return built, [built[0]] * case.world_size


def test_one_parameter_of_a_unit_is_named_by_itself() -> None:
    built, good = shown(FLAT)
    kept: Sequence[oracle.Named] = [{**own, "tail.linear2.weight": built[1]["tail.linear2.weight"]} for own in good]
    found = of_start(FLAT, built, kept)
    assert found is not None
    assert {"units apart", "parameters apart"} == {cause.key for cause in found}
    assert any("tail.linear2.weight: each rank keeps" in cause.text for cause in found)


def test_values_that_no_rank_has_built_have_no_cause() -> None:
    built, good = shown(FLAT)
    odd = [{name: value - 1 for name, value in own.items()} for own in good]
    assert named(of_start(FLAT, built, odd)) == ""


def test_a_unit_that_may_lie_on_rank_0_alone_is_no_evidence() -> None:
    case = replace(FLAT, model=ModelSpec((LayerSpec(1), LayerSpec(2)), units=(1,)))
    built, good = shown(case)
    assert (
        of_start(case, built, [{**own, "tail.linear1.weight": built[1]["tail.linear1.weight"]} for own in good]) is None
    )


def test_a_run_whose_ranks_built_alike_is_not_judged(engine: SimulatedEngine) -> None:
    answer, execution = Run(engine, "fully_shard").answer(FLAT), ran(engine, "fully_shard", FLAT, "broadcast")
    rank, name = execution.ranks[1], "tail.linear2.weight"
    at = next(place for place, noted in enumerate(rank.observations) if noted[0] == probes.start_apart.name)
    rank.observations[at][3][name][0, 0] = answer.steps[0].before[name][0, 0]
    with pytest.raises(UsageError, match=f"rank 1 has built elements of {name} as rank 0"):
        assert_starts_from_rank_0(execution, answer)
    del rank.observations[at]
    with pytest.raises(UsageError, match=r"hooks:start_apart"):
        assert_starts_from_rank_0(execution, answer)
    first = next(noted for noted in execution.ranks[0].observations if noted[0] == probes.start_apart.name)
    rank.observations.append(first)
    first[3][name][0, 0] += 1
    with pytest.raises(UsageError, match="rank 0 has not built the case's model"):
        assert_starts_from_rank_0(execution, answer)


def test_fsdp1_broadcasts_nothing_on_a_cpu(engine: SimulatedEngine) -> None:
    """Why it does not promise it."""

    def program(*_: object) -> None:
        with pytest.raises(ValueError, match="CPU parameters or buffers when `sync_module_states=True`"):
            FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"), sync_module_states=True)

    ranks = InProcessEngine(program=program)
    try:
        execution = ranks.run(Run(engine, "fsdp1")(FLAT).request)
    finally:
        ranks.close()
    assert execution.failure is None, execution.failure.text
