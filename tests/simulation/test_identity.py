"""Calls of programs that announce nothing are told apart by the parameters, modules and phases they are about."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdpcheck import Simulation
from fsdpcheck.simulation.simulate import simulate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(inputs))


def run(program: Callable[[int], object]) -> Simulation:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(dist.get_rank())

    return simulate(whole, 2, show=False)


def mismatch(program: Callable[[int], object]) -> str:
    failure = run(program).failure
    assert failure is not None
    assert failure.kind == "mismatch", failure.text
    return failure.text


def said(program: Callable[[int], object]) -> list[str]:
    """Of each call of rank 0: what it is about, and its phase."""
    return [f"{call.about}|{call.phase}" for call in run(program).check().traces[0]]


def test_gradients_of_one_shape_reduced_in_another_order_are_a_mismatch_with_both_names() -> None:
    def program(rank: int, model: Callable[[], nn.Module] = Net) -> None:
        net = model()
        net(torch.ones(2, 4)).sum().backward()
        parameters = list(net.parameters())
        for parameter in parameters if rank == 0 else parameters[::-1]:
            if parameter.ndim == 2:
                dist.all_reduce(parameter.grad)

    text = mismatch(program)
    assert "differs between its members in subject" in text
    assert "rank 0: all_reduce(float32[4, 4]) sum of gradient of Net.first.weight #0" in text
    assert "rank 1: all_reduce(float32[4, 4]) sum of gradient of Net.second.weight #0" in text
    assert "gradient of Net.second.weight" in mismatch(lambda rank: program(rank, lambda: copy.deepcopy(Net())))


def test_two_models_of_one_class_are_told_apart() -> None:
    def program(rank: int) -> None:
        generator, critic = Net(), Net()
        for net in (generator, critic) if rank == 0 else (critic, generator):
            dist.broadcast(net.first.weight.data, 0)

    text = mismatch(program)
    assert "rank 0: broadcast(float32[4, 4]) root=0 of Net.first.weight #0" in text
    assert "rank 1: broadcast(float32[4, 4]) root=0 of Net#2.first.weight #0" in text


class Reducing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = inputs * self.weight
        dist.all_reduce(found.detach().clone())
        return found


def test_activations_of_two_modules_in_another_order_are_a_mismatch() -> None:
    def program(rank: int) -> None:
        heads = nn.ModuleDict({"query": Reducing(), "key": Reducing()})
        for name in ("query", "key") if rank == 0 else ("key", "query"):
            heads[name](torch.ones(3))

    text = mismatch(program)
    assert "rank 0: all_reduce(float32[3]) sum of ModuleDict.query in forward of ModuleDict.query #0" in text
    assert "rank 1: all_reduce(float32[3]) sum of ModuleDict.key in forward of ModuleDict.key #0" in text


def test_calls_are_named_by_parameter_module_and_phase() -> None:
    def program(rank: int) -> None:
        net = nn.Sequential(nn.Linear(3, 2), Reducing())
        net[0].weight.register_post_accumulate_grad_hook(lambda parameter: dist.all_reduce(parameter.grad))

        class Summing(torch.optim.SGD):
            def step(self) -> None:  # type: ignore[override]
                dist.all_reduce(net[0].bias.grad)
                dist.all_reduce(torch.ones(1))

        net(torch.ones(2, 3)).sum().backward()
        Summing(net.parameters(), lr=0.5).step()

    assert said(program) == [
        "|forward of Sequential.1",
        "gradient of Sequential.0.weight|backward",
        "gradient of Sequential.0.bias|step",
        "|step",
    ]


def test_what_only_one_rank_has_may_meet_another_name() -> None:
    """The first and the last stage of a pipeline reduce the gradient of one tied weight, each by its own name."""

    def program(rank: int) -> None:
        stage = nn.ModuleDict({"embedding" if rank == 0 else "head": nn.Linear(4, 4)})
        (layer,) = stage.values()
        layer(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(layer.weight.grad)

    run(program).check()


def test_a_gather_may_put_different_parameters_together() -> None:
    """Each rank updates its own, and all gather them into place."""

    def program(rank: int) -> None:
        net = Net()
        weights = [net.first.weight.data, net.second.weight.data]
        dist.all_gather([torch.empty(4, 4) for _ in weights], weights[rank])
        dist.all_reduce(weights[rank] if rank == 0 else torch.zeros(4, 4))

    run(program).check()


def test_parts_of_other_parameters_are_not_gathered_together() -> None:
    """Rows of a weight, and the shards of a sharded model: each gather is of one parameter."""

    def views(rank: int) -> None:
        net = Net()
        for layer in (net.first, net.second) if rank == 0 else (net.second, net.first):
            dist.all_gather_into_tensor(torch.empty(4, 4), layer.weight.data[2 * rank : 2 * rank + 2])

    def shards(rank: int) -> None:
        net = Net()
        fully_shard(net)
        for layer in (net.first, net.second) if rank == 0 else (net.second, net.first):
            layer.weight.full_tensor()

    for program in (views, shards):
        text = mismatch(program)
        assert "of Net.first.weight" in text or "of FSDPNet.first.weight" in text, text
        assert "second.weight" in text


def test_ranks_gather_parts_of_a_flat_parameter_that_hold_other_parameters() -> None:
    """Of FSDP1 with original parameters: each rank's part is a view of those that lie in it, and ends with another."""

    def program(rank: int) -> None:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
        sharded = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=True)
        sharded(torch.ones(2, 4)).sum().backward()

    assert run(program).check().returned == (None, None)


def test_flat_parameters_of_one_shape_in_another_order_are_a_mismatch() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = torch.ones(8)
            self.one, self.two = nn.Parameter(self.flat[:4]), nn.Parameter(self.flat[4:])

    def program(rank: int) -> None:
        nets = [Flat(), Flat()]
        for net in nets if rank == 0 else nets[::-1]:
            dist.all_reduce(net.flat)

    assert "all_reduce(float32[8]) sum of Flat#2.two" in mismatch(program)


def test_buffers_have_names_too() -> None:
    def program(rank: int) -> None:
        norm = nn.BatchNorm1d(3)
        for name in ("running_mean", "running_var") if rank == 0 else ("running_var", "running_mean"):
            dist.broadcast(norm.get_buffer(name), src=0)

    assert "rank 1: broadcast(float32[3]) root=0 of BatchNorm1d.running_var #0" in mismatch(program)
