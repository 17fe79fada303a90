"""Releases: an optimizer is given another training's gradients, goes by them, and its own are there again behind it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdpcheck.execution import RankResult, RunRequest
from fsdpcheck.execution.releases import Release
from fsdpcheck.program.probe import Watch
from fsdpcheck.program.releases import Releases
from tests.common.fabricated import SMALL


def stepped(parameter: nn.Parameter, gradients: list[Tensor | None], forced: list[Release] | None = None) -> RankResult:
    """Plain descent of rate 1, a call a step."""
    result, at = RankResult(0), 0
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    Releases(result, lambda: at, forced or ()).see(optimizer)
    for at, gradient in enumerate(gradients):  # noqa: B007 - read by the lambda
        parameter.grad = None if gradient is None else gradient.clone()
        optimizer.step()
    return result


def test_what_an_optimizer_is_given_is_noted() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    result = stepped(parameter, [torch.tensor([1.0, 2.0]), None])
    assert [release.step for release in result.releases] == [0, 1]
    assert torch.equal(result.releases[0].gradients[0], torch.tensor([1.0, 2.0]))  # type: ignore[arg-type]
    assert result.releases[1].gradients == (None,)
    assert result.releases[0].options["lr of group 0"] == 1.0
    assert torch.equal(parameter, torch.tensor([-1.0, -2.0]))


def test_gradients_of_another_training_move_the_parameters_and_the_own_are_shown() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    other = stepped(nn.Parameter(torch.zeros(2)), [torch.tensor([4.0, 8.0]), None, torch.tensor([1.0, 1.0])])
    result = stepped(parameter, [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]), None], other.releases)
    assert torch.equal(parameter, torch.tensor([-5.0, -9.0])), "of the second step there is no gradient"
    assert torch.equal(result.releases[1].gradients[0], torch.tensor([3.0, 3.0]))  # type: ignore[arg-type]
    assert parameter.grad is None, "its own gradient of the last step"
    assert all(release.kept for release in result.releases)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.div_(2)


def test_what_the_optimizer_calls_before_it_is_done_before() -> None:
    """As where a hook divides what was summed, whoever was there first."""
    parameter, given = nn.Parameter(torch.zeros(1)), [Release(0, (torch.tensor([4.0]),), {})]
    result, optimizer = RankResult(0), torch.optim.SGD([parameter], lr=1.0)
    releases = Releases(result, lambda: 0, given)
    releases.see(optimizer)
    optimizer.register_step_pre_hook(lambda *_: halve(parameter))
    releases.come_last()
    parameter.grad = torch.tensor([6.0])
    optimizer.step()
    (release,) = result.releases
    assert (release.gradients, release.kept) == ((torch.tensor([3.0]),), True)
    assert parameter.grad is not None
    assert (parameter.item(), parameter.grad.item()) == (-4.0, 3.0)


def test_an_optimizer_that_sets_gradients_anew_is_noted() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    other = stepped(nn.Parameter(torch.zeros(1)), [torch.tensor([4.0])])
    result = RankResult(0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    Releases(result, lambda: 0, other.releases).see(optimizer)

    def closure() -> float:
        parameter.grad = torch.ones(1)
        return 0.0

    parameter.grad = torch.zeros(1)
    optimizer.step(closure)
    assert [release.kept for release in result.releases] == [False]


def test_at_the_beginning_of_each_step_a_rank_comes_behind_what_was_hung_in_since() -> None:
    parameter, result = nn.Parameter(torch.zeros(1)), RankResult(0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    watch = Watch(RunRequest(SMALL, "x", releases=()), 0, result)
    watch.step = 0
    watch.optimizer(optimizer)
    optimizer.register_step_pre_hook(lambda *_: halve(parameter))
    watch.begin_step()
    parameter.grad = torch.tensor([6.0])
    optimizer.step()
    assert (watch.in_step, result.releases[0].gradients) == (True, (torch.tensor([3.0]),))
