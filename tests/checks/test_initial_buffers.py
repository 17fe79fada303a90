"""Buffers that ranks have built otherwise: who sends which of them, and what is said of those that stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdpcheck import oracle
from fsdpcheck.case import BatchLayout, TrainingCase
from fsdpcheck.checks.features import assert_right
from fsdpcheck.checks.initial_parameters import assert_computes_with_buffers_of_rank_0, assert_starts_from_rank_0
from fsdpcheck.diagnosis import of_buffers
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotExact, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.cause import named
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Probe
from tests.checks.test_initial_parameters import CASES, COPIES, FLAT, REPLICAS

SAVED, UNSAVED = probes.persistent_buffers, probes.non_persistent_buffers
SENT = (
    *(("fully_shard", SAVED), ("ddp", SAVED), ("ddp", UNSAVED)),
    *((adapter, gives) for adapter in ("reference", "reference_fsdp2") for gives in (SAVED, UNSAVED)),
)
APART = "a buffer is not what rank 0 has built"
PLACES = ("", "units.0.", "units.1.")


def ran(engine: Engine, adapter: str, case: TrainingCase, gives: Probe, fault: str = "") -> Execution:
    installs = (f"fsdpcheck.impl.faults:{fault}",) * bool(fault)
    return Run(engine, adapter, installs)(case, using=("broadcast",), probes=(probes.start_apart, gives))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("adapter", "gives"), SENT)
def test_who_sends_buffers_computes_with_rank_0s(
    engine: SimulatedEngine, adapter: str, gives: Probe, case: TrainingCase
) -> None:
    run = Run(engine, adapter)
    if case.requires() - run.features.accepts:
        pytest.skip("ddp has no mesh of replicas")
    answer, execution = run.answer(case), ran(engine, adapter, case, gives)
    assert_computes_with_buffers_of_rank_0(execution, answer, gives)
    assert_starts_from_rank_0(execution, answer)
    assert_right(execution, answer)
    for result in execution.ranks:
        _, *used = [value for _, _, value in gives.saw(result)]
        assert sorted(name.rpartition(".")[0] for one in used for name in one) == ["", "units.0", "units.1"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_who_starts_from_a_state_dict_leaves_buffers_that_it_does_not_have(
    engine: SimulatedEngine, case: TrainingCase
) -> None:
    """Why ``fully_shard`` does not promise them: parameters are rank 0's, and the training is another one."""
    case = replace(case, layout=BatchLayout(batch_size=2 * case.world_size), seed=1)
    answer, execution = Run(engine, "fully_shard").answer(case), ran(engine, "fully_shard", case, UNSAVED)
    assert_starts_from_rank_0(execution, answer)
    with pytest.raises(Violation, match=APART) as found:
        assert_computes_with_buffers_of_rank_0(execution, answer, UNSAVED)
    assert "units.0.unsaved_gain, units.1.unsaved_gain, unsaved_gain: each rank keeps the buffer" in found.value.cause
    with pytest.raises(Violation):
        assert_right(execution, answer)


def test_real_ranks_compute_with_rank_0s_buffers_too() -> None:
    processes = ProcessesEngine()
    try:
        execution = ran(processes, "reference", REPLICAS, UNSAVED)
        answer = Run(processes, "reference").answer(REPLICAS)
        assert_computes_with_buffers_of_rank_0(execution, answer, UNSAVED)
        assert_right(execution, answer)
    finally:
        processes.close()


@pytest.mark.parametrize(
    ("case", "gives", "fault", "cause"),
    [
        (REPLICAS, SAVED, "buffers_not_broadcast_over_replicas", "replicas other than the first compute with buffers"),
        (COPIES, SAVED, "buffers_not_broadcast_over_replicas", "replicas other than the first compute with buffers"),
        (FLAT, SAVED, "only_buffers_of_the_root_are_broadcast", "units.0.saved_gain, units.1.saved_gain: each rank"),
        (FLAT, UNSAVED, "buffers_broadcast_from_a_state_dict", "units.1.unsaved_gain, unsaved_gain: each rank keeps"),
        (FLAT, UNSAVED, "broadcast_from_the_last_rank", "all ranks compute with the buffers of rank 2"),
    ],
)
def test_the_cause_is_named(engine: SimulatedEngine, case: TrainingCase, gives: Probe, fault: str, cause: str) -> None:
    answer, execution = Run(engine, "reference").answer(case), ran(engine, "reference", case, gives, fault)
    with pytest.raises(Violation, match=APART) as found:
        assert_computes_with_buffers_of_rank_0(execution, answer, gives)
    assert cause in found.value.cause


def test_a_state_dict_has_the_buffers_that_are_sent_with_one(engine: SimulatedEngine) -> None:
    answer = Run(engine, "reference").answer(FLAT)
    execution = ran(engine, "reference", FLAT, SAVED, "buffers_broadcast_from_a_state_dict")
    assert_computes_with_buffers_of_rank_0(execution, answer, SAVED)
    assert_right(execution, answer)


def shown(case: TrainingCase, *owners: int) -> tuple[list[oracle.Named], list[oracle.Named]]:
    """The buffers that each rank builds, and those of its owner, with which it computes."""
    built = [
        {f"{place}saved_gain": torch.tensor([2.0 ** (rank + 1)]) for place in PLACES} for rank in range(case.world_size)
    ]
    return built, [built[owner] for owner in owners]


def test_buffers_of_a_rank_that_sent_them_to_some_have_no_cause() -> None:
    assert named(of_buffers(FLAT, *shown(FLAT, 0, 2, 2))) == ""


def test_a_rank_that_shows_some_of_its_buffers_is_no_evidence() -> None:
    built, used = shown(FLAT, 0, 1, 2)
    assert of_buffers(FLAT, built, [*used[:2], {"saved_gain": built[2]["saved_gain"]}]) is None


def test_a_run_that_does_not_tell_with_what_it_computes_is_not_judged(engine: SimulatedEngine) -> None:
    answer, execution = Run(engine, "reference").answer(FLAT), ran(engine, "reference", FLAT, SAVED)
    with pytest.raises(UsageError, match=r"run with fsdpcheck.*non_persistent_buffers"):
        assert_computes_with_buffers_of_rank_0(execution, answer, UNSAVED)
    rank = execution.ranks[1]
    own = [noted for noted in rank.observations if noted[0] == SAVED.name]
    silent = replace(rank, observations=[noted for noted in rank.observations if noted not in own[1:]])
    with pytest.raises(NotExact, match="calls no module that has a buffer"):
        assert_computes_with_buffers_of_rank_0(
            replace(execution, ranks=[execution.ranks[0], silent, execution.ranks[2]]), answer, SAVED
        )
