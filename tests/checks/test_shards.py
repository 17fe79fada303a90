"""Shards that cover the parameters once pass; a gap, an overlap, a copy and other replicas do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.checks.shards import _place, assert_covered
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NotApplicable, UsageError
from fsdpcheck.execution import Execution
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes

CASE = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True, frozen="bias"), LayerSpec(1)), features=2, units=(1,)),
    MeshSpec(dp_shard=2, dp_replicate=2),
    BatchLayout("contiguous", 4),
    arithmetic=Arithmetic(project=False, numbers="real"),
)


def executed(engine: SimulatedEngine, adapter: str = "reference", padding: bool = True) -> Execution:
    return Run(engine, adapter)(CASE, probes=(probes.local_tensors, *[probes.padding] * padding))


def held(execution: Execution, rank: int, moment: str) -> list[Tensor]:
    """What a rank held, live."""
    seen = probes.local_tensors.saw(execution.ranks[rank])
    value: list[Tensor] = next(v for at, _, v in seen if at == moment)
    return value


@pytest.mark.parametrize("adapter", ["reference", "fully_shard", "fsdp1"])
def test_each_way_to_shard_covers_everything_once(engine: SimulatedEngine, adapter: str) -> None:
    assert_covered(executed(engine, adapter, padding=adapter == "reference"))


@pytest.mark.parametrize(("moment", "words"), [("after_init", "before the first step"), ("after_step", "step 0")])
def test_a_lost_element_is_found(engine: SimulatedEngine, moment: str, words: str) -> None:
    execution = executed(engine)
    for rank in (0, 2):
        held(execution, rank, moment)[0][0] += 1
    with pytest.raises(Violation, match="lies on no rank") as caught:
        assert_covered(execution)
    assert caught.value.where.startswith(f"{words}, ranks 0 to 1, ")


def test_an_element_on_two_ranks_is_found(engine: SimulatedEngine) -> None:
    execution = executed(engine)
    for rank in (2, 3):
        mine = held(execution, rank, "after_step")
        mine.append(held(execution, 2, "after_step")[0][:1].clone())
    with pytest.raises(Violation, match="lies on several ranks") as caught:
        assert_covered(execution)
    assert caught.value.got == "2 elements more than the 13 there are"
    assert "ranks 2 to 3" in caught.value.where
    assert caught.value.cause == ""


def test_zeros_beyond_the_padding_are_found(engine: SimulatedEngine) -> None:
    execution = executed(engine)
    for rank in (0, 2):
        held(execution, rank, "after_init").append(torch.zeros(3))
    with pytest.raises(Violation, match="a rank holds what no parameter has") as caught:
        assert_covered(execution)
    assert "no parameter = 0.0" in caught.value.where


def test_what_may_be_padding_is_no_element_where_none_is_shown(engine: SimulatedEngine) -> None:
    """Zeros, and values that no parameter has, such as a buffer that nobody has filled."""
    with pytest.raises(NotApplicable, match="may be padding: show it"):
        assert_covered(executed(engine, padding=False))
    execution = executed(engine, "fully_shard", padding=False)
    held(execution, 0, "after_init").append(torch.tensor([float("nan"), 42.0]))
    with pytest.raises(NotApplicable, match="2 elements are held"):
        assert_covered(execution)
    held(execution, 0, "after_init").append(held(execution, 0, "after_init")[0].clone())
    with pytest.raises(Violation, match=r"lies on several ranks|what no parameter has"):
        assert_covered(execution)


def test_an_element_of_the_harness_itself_is_called_so() -> None:
    only = {"instrument.weight": torch.tensor([[7.0]])}
    assert _place(7.0, only) == "instrument.weight[0, 0] (the harness's own gauge layer, beside every model)"
    assert _place(7.0, only | {"units.0.weight": torch.tensor([7.0])}) == "units.0.weight[0]"


def test_whole_copies_are_called_so(engine: SimulatedEngine) -> None:
    run = Run(engine, "reference", installs=("fsdpcheck.impl.faults:replicated_instead_of_sharded",))
    case = TrainingCase(CASE.model, MeshSpec(2), CASE.layout, arithmetic=CASE.arithmetic)
    with pytest.raises(Violation, match="lies on several ranks") as caught:
        assert_covered(run(case, probes=(probes.local_tensors,)))
    assert caught.value.cause == "nothing is sharded: every rank holds whole parameters"


def test_replicas_hold_the_same(engine: SimulatedEngine) -> None:
    execution = executed(engine)
    shards = held(execution, 3, "after_step")
    shards[-1] = shards[-1].flip(0)
    assert torch.equal(shards[-1].sort().values, held(execution, 1, "after_step")[-1].sort().values)
    with pytest.raises(Violation, match="replicas hold different shards"):
        assert_covered(execution)


def test_a_run_that_was_not_watched_is_refused(engine: SimulatedEngine) -> None:
    with pytest.raises(UsageError, match=r"run with probes\.local_tensors"):
        assert_covered(Run(engine, "reference")(CASE))
