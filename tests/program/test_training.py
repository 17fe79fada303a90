"""What every rank runs: the optimizer a case asks for, its schedule, and a state that survives being resumed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdpcheck import program
from fsdpcheck.case import LayerSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.errors import AdapterError
from fsdpcheck.program.optimizers import Optimizers
from fsdpcheck.workload.optimizer import at_step, make_optimizer

KINDS = {
    "sgd": OptimizerSpec("sgd", 1),
    "momentum": OptimizerSpec("sgd", 1, 0.5, 0.25),
    "adam": OptimizerSpec("adam", 2, weight_decay=0.5),
    "adamw": OptimizerSpec("adamw", 2, weight_decay=0.5),
    "halving": OptimizerSpec("adam", 1, schedule="halving"),
}
EVERY = pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS.keys())


def trained(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: int = 4) -> list[Tensor]:
    """The parameter after each step, with gradients that change."""
    found = []
    for step in range(steps):
        parameter.grad = torch.tensor([1.0, -2.0, 3.0 + step], dtype=torch.float64)
        optimizer.step()
        found.append(parameter.detach().clone())
    return found


def ones() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=torch.float64))


def own(spec: OptimizerSpec, parameter: nn.Parameter, resume: bool) -> torch.optim.Optimizer:
    """What an implementation is given for a case."""
    case = TrainingCase(ModelSpec((LayerSpec(1),)), step=StepSpec(optimizer=spec, resume=resume))
    return Optimizers(case, None)([parameter])


def rates(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, steps: int) -> list[float]:
    found = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        trained(optimizer, parameter, 1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("resume", [False, True])
def test_halving_halves_the_learning_rate_after_each_step(resume: bool) -> None:
    parameter = ones()
    assert rates(own(KINDS["halving"], parameter, resume), parameter, 3) == [0.5, 0.25, 0.125, 0.0625]
    assert [2.0 ** -at_step(KINDS["halving"], k).lr_exponent for k in range(3)] == [0.5, 0.25, 0.125]
    assert rates(own(KINDS["adam"], parameter, resume), parameter, 2) == [0.25] * 3
    assert [at_step(KINDS["adam"], k) for k in range(2)] == [KINDS["adam"]] * 2


def test_vectors_are_a_group_of_half_the_rate_without_weight_decay() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2, dtype=torch.float64)), ones()
    spec = OptimizerSpec("sgd", 1, weight_decay=0.5, groups="vectors apart")
    apart = (vector, 0.25, 0.0)
    for given, wanted in (([vector, matrix], [(matrix, 0.5, 0.5), apart]), ([vector], [apart])):
        groups = make_optimizer(spec, given).param_groups
        assert [(group["lr"], group["weight_decay"]) for group in groups] == [(lr, decay) for _, lr, decay in wanted]
        assert all(group["params"][0] is one for group, (one, _, _) in zip(groups, wanted, strict=True))


def test_parameters_of_the_last_unit_are_a_group_if_they_have_names() -> None:
    model = ModelSpec((LayerSpec(1), LayerSpec(1)), units=(1, 1))
    case = TrainingCase(model, step=StepSpec(optimizer=OptimizerSpec(groups="last unit apart")))
    first, last, strange = ones(), ones(), ones()
    made = Optimizers(case, None)
    made.begin(nn.Module())
    named = [("units.0.linear0.weight", first), ("units.1.linear0.weight", last), ("instrument.weight", strange)]
    groups = made(named).param_groups
    assert [[id(one) for one in group["params"]] for group in groups] == [[id(first), id(strange)], [id(last)]]
    assert [group["lr"] for group in groups] == [1.0, 0.5]
    with pytest.raises(AdapterError, match="without their names"):
        made([first])


@EVERY
def test_a_resumed_optimizer_goes_on_as_if_nothing_had_happened(spec: OptimizerSpec) -> None:
    one, other = ones(), ones()
    for got, wanted in zip(trained(own(spec, one, True), one), trained(own(spec, other, False), other), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["momentum", "adam", "adamw"])
def test_a_state_that_is_not_saved_is_lost_when_resumed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = ones()
    wanted = trained(own(KINDS[name], parameter, False), parameter)
    right = torch.optim.Optimizer.state_dict

    def forgetful(self: torch.optim.Optimizer) -> dict[str, Any]:
        return {**right(self), "state": {}}

    monkeypatch.setattr(torch.optim.Optimizer, "state_dict", forgetful)
    parameter = ones()
    got = trained(own(KINDS[name], parameter, True), parameter)
    assert torch.equal(got[0], wanted[0])
    assert not torch.equal(got[1], wanted[1])


def test_adam_decays_its_gradient_and_adamw_its_weight() -> None:
    one, other = ones(), ones()
    adam, adamw = own(KINDS["adam"], one, False), own(KINDS["adamw"], other, False)
    assert (type(adam), type(adamw)) == (torch.optim.Adam, torch.optim.AdamW)
    assert not torch.equal(trained(adam, one, 1)[0], trained(adamw, other, 1)[0])


# -- ranks that show what is not theirs -------------------------------------------------------------------------------


def test_a_rank_whose_own_copy_differs_from_what_it_shows_is_seen() -> None:
    shown = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, float("nan")]), "c": torch.tensor([[1.0]])}
    whole = [shown["c"], shown["b"], shown["a"]]
    assert program._hidden(shown, [tensor.clone() for tensor in whole]) == ""
    drifted = [shown["c"], shown["b"], shown["a"] + 2.0**-40]
    assert program._hidden(shown, drifted) == ""  # float32 rounds it away
    drifted = [shown["c"], shown["b"], shown["a"] * (1 + 2.0**-20)]
    assert program._hidden(shown, drifted) == "a"


def test_shards_are_not_compared_with_what_is_shown() -> None:
    shown = {"a": torch.zeros(4), "b": torch.zeros(2)}
    assert program._hidden(shown, [torch.ones(2), torch.ones(1)]) == ""
    assert program._hidden(shown, [torch.ones(6)]) == ""
