"""Calls under way: who touches their buffers is told at the line that does, and so is who never waits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck import Simulation
from fsdpcheck.simulation.simulate import simulate


def run(program: Callable[[torch.Tensor], object]) -> Simulation:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(torch.full((4,), dist.get_rank() + 1.0))

    return simulate(whole, 2, show=False)


def reads(tensor: torch.Tensor) -> object:
    work = dist.all_reduce(tensor, async_op=True)
    halves = tensor.view(2, 2)[0].detach()
    half = halves * 2  # here
    work.wait()
    return half


def reads_a_number(tensor: torch.Tensor) -> object:
    work = dist.all_reduce(tensor, async_op=True)
    if tensor[1].item() > 2:  # here
        work.wait()
    return None


def writes_what_is_sent(tensor: torch.Tensor) -> object:
    work = dist.all_gather([torch.empty(4), torch.empty(4)], tensor, async_op=True)
    tensor.mul_(2)  # here
    return work.wait()


def writes_what_will_be_written(tensor: torch.Tensor) -> object:
    pieces = [torch.empty(4), torch.empty(4)]
    work = dist.all_gather(pieces, tensor, async_op=True)
    torch.add(tensor, 1, out=pieces[1])  # here
    return work.wait()


def steps_before_it_waits(tensor: torch.Tensor) -> object:
    """Calls issued in a backward, whose modes torch takes back when it ends."""
    model, works = nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))
    model(tensor).sum().backward()
    optimizer.step()  # here
    return [work.wait() for work in works]


def reads_what_a_wrapper_holds(tensor: torch.Tensor) -> object:
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(tensor, mesh, [Shard(0)])
    work = dist.all_reduce(tensor, async_op=True)
    double = sharded * 2  # here
    work.wait()
    return double


def frees_what_is_sent(tensor: torch.Tensor) -> object:
    work = dist.all_gather([torch.empty(4), torch.empty(4)], tensor, async_op=True)  # here
    tensor.untyped_storage().resize_(0)
    return work.wait()


@pytest.mark.parametrize(
    ("program", "did"),
    [
        (reads, "read an output"),
        (reads_a_number, "read an output"),
        (writes_what_is_sent, "wrote to an input"),
        (writes_what_will_be_written, "wrote to an output"),
        (steps_before_it_waits, "read an output"),
        (reads_what_a_wrapper_holds, "read an output"),
        (frees_what_is_sent, "freed an input"),
    ],
)
def test_what_touches_a_buffer_of_a_call_under_way_is_told_at_its_line(
    program: Callable[[torch.Tensor], object], did: str
) -> None:
    failure = run(program).failure
    assert failure is not None
    assert failure.kind == "in-flight"
    assert re.match(f"rank [01] {did} of shape", failure.text)
    lines, first = inspect.getsourcelines(program)
    line = first + next(number for number, text in enumerate(lines) if text.endswith("# here\n"))
    assert failure.ranks[0].where == f"{__file__}:{line}"


def reads_inputs_and_other_halves(tensor: torch.Tensor) -> float:
    whole = torch.zeros(8)
    work = dist.all_gather([torch.empty(4), torch.empty(4)], tensor, async_op=True)
    other = dist.all_reduce(whole[:4], async_op=True)
    found = (tensor * 2).sum() + whole[4:].add_(1).sum()
    other.wait()
    work.wait()
    return found.item() + whole.sum().item()


def looks_at_shapes_alone(tensor: torch.Tensor) -> float:
    work = dist.all_reduce(tensor, async_op=True)
    other = torch.empty_like(tensor).fill_(1) + torch.zeros_like(tensor) + tensor.new_ones(4)
    work.wait()
    return other.sum().item()


def enters_and_leaves_modes(tensor: torch.Tensor) -> float:
    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            Counts.seen += 1
            return func(*args, **(kwargs or {}))  # type: ignore[operator, misc]

    outer, inner = Counts(), Counts()
    with outer:
        with inner:
            work = dist.all_reduce(tensor, async_op=True)
        before = Counts.seen
        torch.ones(1)
        once = Counts.seen - before
        work.wait()
    before = Counts.seen
    torch.ones(1)
    return float(once - (Counts.seen - before))


def trains_in_parallel(tensor: torch.Tensor) -> bool:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(tensor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return bool(torch.isfinite(torch.cat([value.flatten() for value in model.parameters()])).all())


def trains_sharded(tensor: torch.Tensor) -> bool:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        model(tensor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return True


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        (reads_inputs_and_other_halves, 24.0),
        (looks_at_shapes_alone, 8.0),
        (enters_and_leaves_modes, 1.0),
        (trains_in_parallel, True),
        (trains_sharded, True),
    ],
)
def test_what_a_program_may_do_meanwhile_is_let_be(program: Callable[[torch.Tensor], object], wanted: object) -> None:
    done = run(program).check()
    if program is reads_inputs_and_other_halves:
        wanted = tuple((rank + 1) * 8.0 + 4 + 4 for rank in range(2))
        assert done.returned == wanted
    else:
        assert done.returned == (wanted, wanted)


def test_many_calls_of_operators_under_way_cost_no_depth() -> None:
    """Each is issued by an operation that is seen itself (DTensor's, a gathered state dict's)."""

    def gathers(tensor: torch.Tensor) -> object:
        gathered = [funcol.all_gather_tensor(tensor, 0, dist.group.WORLD) for _ in range(150)]
        return sum(each.sum().item() for each in gathered)

    assert run(gathers).check().returned == (150 * 12.0,) * 2


def test_a_call_that_is_never_waited_for_is_told_with_its_line() -> None:
    def forgets(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, async_op=True)

    failure = run(forgets).failure
    assert failure is not None
    assert failure.kind == "never waited for"
    assert f"rank 1: all_reduce(float32[4]) sum #0 on ranks [0, 1], issued at {__file__}:" in failure.text


def test_a_functional_call_whose_result_nobody_looks_at_is_told_with_its_line() -> None:
    def forgets(tensor: torch.Tensor) -> float:
        funcol.all_reduce(tensor, "sum", dist.group.WORLD)
        return tensor.sum().item()

    failure = run(forgets).failure
    assert failure is not None
    assert failure.kind == "never waited for"
    assert f"issued at {__file__}:" in failure.text


def test_a_call_that_torch_itself_never_waits_for_is_no_finding() -> None:
    of_torch: dict[str, Callable[[torch.Tensor], object]] = {}
    text = "from torch.distributed import all_reduce\ndef start(tensor): all_reduce(tensor, async_op=True)\n"
    exec(compile(text, torch.__file__, "exec"), of_torch)
    done = run(of_torch["start"]).check()
    assert done.voids == ("a call was never waited for",)
