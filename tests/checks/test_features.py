"""Features of FSDP2: one law and one promise each, reasons by family, and what tells a feature from none."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from fsdpcheck.adapters import load
from fsdpcheck.adapters.contract import Promise, Use
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks import features as feature_checks
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.processes import ProcessesEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RankResult, RunRequest, StepRecord
from fsdpcheck.execution.trace import Collective
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.program.probe import GRAPHS
from tests.common.releases import resets_iterations

CASE = TrainingCase(ModelSpec((LayerSpec(1),)))
TWO_MICRO_BATCHES = TrainingCase(
    ModelSpec((LayerSpec(1),)),
    layout=BatchLayout(batch_size=2),
    step=StepSpec(micro_batches=2, sync_every=False),
)


def seen(*trace: Collective, noted: tuple[tuple[str, Any], ...] = (), built: int = 0) -> Execution:
    """One step of one rank with these collectives and notes, ``built`` of the former while its trainer was built."""
    observations = [(name, "noted", 0, value) for name, value in ((probes.set_up.name, built), *noted)]
    result = RankResult(0, {}, [StepRecord({})], observations, trace)
    return Execution("made up", RunRequest(CASE, "x"), [result])


def test_every_feature_has_a_promise_and_a_law_and_fully_shard_makes_it() -> None:
    names = {f"features.{use}" for use in get_args(Use)}
    more = {"features.broadcast-buffers"}
    assert names | more == {name for name in get_args(Promise) if name.startswith("features.")}
    assert names | more <= chapters().keys()
    assert names | more == {law.promise for name, law in chapters().items() if name.startswith("features.")}
    assert names == {name for name in load("fully_shard").features.promises if name.startswith("features.")}


@pytest.mark.nightly
def test_breaks_of_graphs_are_not_told_on_stderr(engine: SimulatedEngine, capfd: pytest.CaptureFixture[str]) -> None:
    law = chapters()["features.private-compiled"]
    assert check_law(law, Run(engine, "reference")).status == "holds"
    assert capfd.readouterr().err == ""


def test_one_reason_stands_for_a_family_of_promises() -> None:
    reason = chapters()["features.prefetch"].not_promised(load("reference").features)
    assert reason.startswith("no promise 'features.prefetch': shards flat buffers")


def test_a_feature_without_effect_is_found() -> None:
    call = Collective("all_gather", (0, 1), "world", 0)
    with pytest.raises(Violation, match="prefetch has no effect"):
        feature_checks.assert_in_effect(seen(call), seen(call), "prefetch")


@pytest.mark.parametrize(
    "using",
    [
        seen(Collective("all_gather", (0, 1), "world", 0), Collective("all_gather", (0, 1), "world", 1)),
        seen(Collective("all_reduce", (0, 1), "world", 0)),
        seen(Collective("all_gather", (0, 1), "world", 0), noted=((probes.footprint.name, ("layer", 2)),)),
        seen(Collective("all_gather", (0, 1), "world", 0), noted=((GRAPHS, 3),)),
    ],
    ids=["one more call", "another call", "called later", "a graph"],
)
def test_what_shows_of_a_feature_is_seen(using: Execution) -> None:
    without = seen(Collective("all_gather", (0, 1), "world", 0))
    feature_checks.assert_in_effect(without, using, "prefetch")


GATHERED = Collective("all_gather", (0, 1), "world", 0)


@pytest.mark.parametrize(
    ("using", "got"),
    [
        (seen(GATHERED, Collective("all_gather", (0, 1), "world", 1)), "'all_gather'"),
        (seen(Collective("all_reduce", (0, 1), "world", 0)), "'all_reduce'"),
        (seen(), "0 collectives"),
    ],
    ids=["one more", "another", "one less"],
)
def test_collectives_that_a_feature_changes_are_told(using: Execution, got: str) -> None:
    feature_checks.assert_same_collectives(seen(GATHERED), seen(GATHERED, noted=((GRAPHS, 3),)), "compiled")
    with pytest.raises(Violation, match="compiled changes the collectives") as found:
        feature_checks.assert_same_collectives(seen(GATHERED), using, "compiled")
    assert got in found.value.got


def test_what_is_called_while_the_trainer_is_built_counts_for_meta_alone() -> None:
    once, again = Collective("broadcast", (0, 1), "world", 0), Collective("broadcast", (0, 1), "world", 1)
    without, using = seen(once, built=1), seen(once, again, built=2)
    with pytest.raises(Violation, match="prefetch has no effect"):
        feature_checks.assert_in_effect(without, using, "prefetch")
    feature_checks.assert_in_effect(without, using, "meta")


def test_a_run_that_does_not_say_where_its_set_up_ends_is_not_compared() -> None:
    with pytest.raises(UsageError, match=r"probes\.set_up"):
        feature_checks.footprint(RankResult(0))


WATCHED = (probes.set_up, probes.footprint)
REPLICAS = TrainingCase(
    ModelSpec((LayerSpec(2), LayerSpec(2)), units=(1, 1)), MeshSpec(2, 2), BatchLayout(batch_size=1)
)
FLAT = TrainingCase(
    ModelSpec((LayerSpec(4), LayerSpec(4), LayerSpec(4)), units=(1, 1)), MeshSpec(4), BatchLayout(batch_size=1)
)


def footprints(engine: Engine, case: TrainingCase, *using: Use) -> list[feature_checks.Footprint]:
    execution = Run(engine, "fully_shard")(case, using=using, probes=WATCHED)
    assert execution.failure is None, execution.failure.text
    return [feature_checks.footprint(result) for result in execution.ranks]


@pytest.mark.parametrize("case", [REPLICAS, FLAT], ids=["replicas", "flat"])
@pytest.mark.parametrize("using", [(), ("unshard",), ("bare-root",)], ids=["plain", "unshard", "bare-root"])
def test_a_footprint_is_that_of_the_case_whatever_ran_before(
    engine: SimulatedEngine, case: TrainingCase, using: tuple[Use, ...]
) -> None:
    """Groups of all ranks outlive a run in a pool of rank threads, and what was counted on them must not."""
    fresh = SimulatedEngine()
    first = footprints(fresh, case, *using)
    fresh.close()
    footprints(engine, FLAT, "state-dict")
    assert footprints(engine, case, *using) == first
    footprints(engine, REPLICAS, "ignored")
    assert footprints(engine, case, *using) == first


def test_a_footprint_is_that_of_the_case_on_real_ranks_too(engine: SimulatedEngine) -> None:
    processes = ProcessesEngine()
    try:
        assert footprints(processes, REPLICAS, "ignored") == footprints(engine, REPLICAS, "ignored")
    finally:
        processes.close()


def test_a_feature_that_is_dropped_is_seen_whatever_ran_before(engine: SimulatedEngine) -> None:
    run = Run(engine, "fully_shard", installs=("fsdpcheck.impl.faults:unshard_by_hand_dropped",))
    without = run(FLAT, probes=WATCHED)
    footprints(engine, REPLICAS, "ignored")
    using = run(FLAT, using=("unshard",), probes=WATCHED)
    with pytest.raises(Violation, match="unshard has no effect"):
        feature_checks.assert_in_effect(without, using, "unshard")
    feature_checks.assert_in_effect(without, Run(engine, "fully_shard")(FLAT, using=("unshard",), probes=WATCHED),
                                    "unshard")  # fmt: skip


def test_losses_have_a_slope_where_a_watcher_noted_one() -> None:
    assert feature_checks.has_slopes(seen(noted=((probes.footprint.name, (probes.SLOPE, 1.0)),)))
    assert not feature_checks.has_slopes(seen(noted=((probes.footprint.name, (probes.SLOPE, 0.0)),)))
    assert not feature_checks.has_slopes(seen(noted=((probes.footprint.name, ("layer", 2)),)))


def test_the_cause_is_the_feature_if_the_training_is_right_without_it(engine: SimulatedEngine) -> None:
    run = Run(engine, "fully_shard", installs=("fsdpcheck.impl.faults:recomputed_from_zeros",))
    using = run(CASE, using=("checkpointing",))
    with pytest.raises(Violation, match="right without checkpointing"):
        feature_checks.assert_right_with("checkpointing", using, run.answer(CASE))


def test_a_divide_factor_is_applied_twice_on_replicas_of_one_shard(engine: SimulatedEngine) -> None:
    """Torch 2.13 divides by its square on a mesh (n, 1), here by 16 in place of 4."""
    case = TrainingCase(ModelSpec((LayerSpec(1),)), MeshSpec(1, 2), BatchLayout(batch_size=1))
    run = Run(engine, "fully_shard")
    right = run.answer(case).steps[0].used["tail.linear0.weight"]
    found = run(case, ("grads",), using=("divide-factor",)).ranks[0].steps[0].grads
    assert found is not None
    assert right.abs().item() == 8
    assert torch.equal(found["tail.linear0.weight"], right / 4)


@resets_iterations
def test_what_reset_iter_state_leaves_behind(engine: SimulatedEngine) -> None:
    """Torch 2.13 keeps gradients of micro-batches that were not reduced, although it documents that it drops them."""
    watched = (probes.interrupt_later,)
    kept = {}
    for name in ("fully_shard", "fully_shard:by_the_book"):
        run = Run(engine, name)
        execution = run(TWO_MICRO_BATCHES, probes=watched)
        try:
            feature_checks.assert_right(execution, run.answer(TWO_MICRO_BATCHES))
            kept[name] = False
        except Violation:
            kept[name] = True
    assert kept == {"fully_shard": False, "fully_shard:by_the_book": True}


@pytest.mark.parametrize(
    ("front", "second", "units", "reads"),
    [
        (LayerSpec(1), LayerSpec(1), (1,), True),
        (LayerSpec(1, frozen="weight"), LayerSpec(1), (1,), False),
        (LayerSpec(1, bias=True, frozen="weight"), LayerSpec(1), (1,), False),  # the gradient of a bias reads nothing
        (LayerSpec(1, frozen="weight"), LayerSpec(1), (1, 1), True),
        (LayerSpec(1, frozen="weight"), LayerSpec(1), (), True),
        (LayerSpec(1), LayerSpec(1, frozen="weight"), (1, 1), True),
    ],
)
def test_only_units_that_the_backward_reads_are_computed_again(
    engine: SimulatedEngine, front: LayerSpec, second: LayerSpec, units: tuple[int, ...], reads: bool
) -> None:
    case, run = TrainingCase(ModelSpec((front, second), units=units)), Run(engine, "reference")
    without, using = (run(case, using=uses, probes=WATCHED) for uses in ((), ("checkpointing",)))
    assert feature_checks.backward_reads_units(case, run.answer(case)) == reads
    assert feature_checks.in_effect(without, using, "checkpointing") == reads
