"""A user's own optimizer: the single device has it too, ranks that have another are found, and others are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fsdpcheck import oracle
from fsdpcheck.case import OptimizerSpec, UserModelSpec, from_json
from fsdpcheck.case.training import FILLER
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import InvalidCase, InvalidToken, UsageError
from fsdpcheck.findings import tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import user_model as drawing
from fsdpcheck.workload import models
from fsdpcheck.workload.user_model import inspection, own_optimizer

TOYS = str(Path(__file__).parent.parent / "toys" / "own_optimizers.py")


def _own(optimizer: str) -> UserModelSpec:
    return inspection.inspect(f"{TOYS}:build", f"{TOYS}:batch", "", None, f"{TOYS}:{optimizer}").own


def _judged(engine: SimulatedEngine, law: str, adapter: str, optimizer: str, most: int = 5) -> Verdict:
    run = Run(engine, adapter, own=_own(optimizer))
    return check_law(chapters()[law], run, world_sizes=(2, 3), most=most, shrink=False)


@pytest.mark.parametrize(
    ("law", "adapter", "optimizer"),
    [
        ("training.plain", "fully_shard", "grouped"),
        ("training.plain", "ddp", "several"),
        ("training.plain", f"{TOYS}:parallelize", "container"),
        ("training.plain", f"{TOYS}:parallelize,step=step", "several"),
        ("global-norm.update", f"{TOYS}:parallelize", "grouped"),
    ],
)
def test_a_right_optimizer_holds(law: str, adapter: str, optimizer: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, law, adapter, optimizer)
    assert (verdict.status, verdict.reason) == ("holds", "")


@pytest.mark.parametrize(
    ("adapter", "optimizer"),
    [("fully_shard", "decay_by_shard"), (f"{TOYS}:parallelize", "own_part_only"), ("ddp", "own_part_only")],
)
def test_an_optimizer_that_ranks_have_otherwise_is_found(adapter: str, optimizer: str, engine: SimulatedEngine) -> None:
    verdict = _judged(engine, "training.plain", adapter, optimizer)
    assert verdict.status == "finding"


def test_an_implementation_that_trains_other_tensors_is_not_supported(engine: SimulatedEngine) -> None:
    verdict = _judged(engine, "training.plain", "reference", "grouped", most=2)
    assert (verdict.status, verdict.exit_code) == ("not supported", 2)
    assert "does not train that model's own parameters" in verdict.reason


def test_a_law_on_momentum_is_asked_of_an_optimizer_of_ones_own(engine: SimulatedEngine) -> None:
    """Which optimizers there are is the user's to say; and its own weights are replayed by it too."""
    run = Run(engine, "fully_shard", own=_own("grouped"))
    verdict = check_law(chapters()["rounding.update"], run, world_sizes=(2,), most=10, shrink=False)
    assert (verdict.status, verdict.reason) == ("holds", "")


def test_the_single_device_updates_by_it() -> None:
    own = _own("grouped")
    case = drawing.on_model(own, False, FILLER)
    step = oracle.answer(case).steps[0]
    model = models.build(case)
    optimizer = own_optimizer.made(own.optimizer, model.get_submodule("model"))
    for name, value in model.named_parameters():
        value.grad = step.used.get(name)
    optimizer.step()
    for name, value in model.named_parameters():
        assert torch.equal(value, step.after[name])
    assert any(not torch.equal(step.before[name], step.after[name]) for name in step.used)


def test_a_case_of_it_is_read_back() -> None:
    case = drawing.on_model(_own("several"), False, FILLER)
    assert case.step.optimizer == OptimizerSpec("own")
    assert from_json(case.to_json()) == case
    assert "your own optimizer" in case.describe()
    with pytest.raises(InvalidCase, match="gauge True"):
        replace(case, model=replace(case.model, own=replace(case.model.own, gauge=True)))


def test_a_token_imports_it_only_if_it_is_repeated() -> None:
    case = drawing.on_model(_own("several"), False, FILLER)
    token = tokens.Token("training.plain", "fully_shard", case)
    build, batch, optimizer = (f"{TOYS}:{name}" for name in ("build", "batch", "several"))
    assert f"--optimizer {optimizer}" in tokens.command(tokens.encode(token), "fully_shard")
    assert tokens.trusted(token, own=(build, batch, "", optimizer)) == token
    with pytest.raises(InvalidToken, match="If you trust it, repeat it: --optimizer"):
        tokens.trusted(token, own=(build, batch, "", ""))


def test_fused_kernels_are_switched_off() -> None:
    optimizer = own_optimizer.made(f"{TOYS}:grouped", nn.Linear(2, 2))
    assert [group["fused"] for group in optimizer.param_groups] == [False, False]


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ("nothing", "gives no optimizer\n  got     nothing"),
        ("of_another_model", "no parameter of the model it is given"),
        ("raises", "Invalid learning rate: -1.0"),
        ("at_rest", "updates nothing"),
        ("freezes", "changes the model"),
        ("normed", "mixes elements"),
        ("by_places", "in other places of a tensor"),
        ("dithered", "gives another update each time"),
        ("no_such", "has no 'no_such'"),
    ],
)
def test_an_optimizer_without_an_exact_answer_is_refused(optimizer: str, said: str) -> None:
    with pytest.raises(UsageError) as told:
        _own(optimizer)
    assert said in str(told.value)
