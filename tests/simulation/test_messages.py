"""Messages between simulated ranks: who gets which, when a hang is one, and what must agree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdpcheck import Simulation
from fsdpcheck.simulation.simulate import simulate
from tests.common.releases import connects_stages_of_one_rank


def run(program: Callable[[int, int], object], world_size: int = 2) -> Simulation:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(dist.get_rank(), dist.get_world_size())

    return simulate(whole, world_size, show=False)


def failed(program: Callable[[int, int], object], kind: str, world_size: int = 2) -> str:
    failure = run(program, world_size).failure
    assert failure is not None
    assert failure.kind == kind, failure.text
    return failure.text


def test_a_ring_of_messages_moves_each_tensor_to_the_next_rank() -> None:
    def ring(rank: int, size: int) -> list[float]:
        got = torch.zeros(2)
        sent = dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, got, (rank - 1) % size)]):
            work.wait()
        return got.tolist()

    done = run(ring, 4).check()
    assert done.returned == ([3.0, 3.0], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0])
    assert done.voids == ()
    assert all(call.asynchronous for call in done.traces[0])
    assert [str(call) for call in done.traces[0]] == [
        "send(float32[2]) #0 from rank 0 to rank 1, tag 0",
        "recv(float32[2]) #0 from rank 3 to rank 0, tag 0",
    ]


def test_messages_are_told_apart_by_group_source_and_tag_and_keep_their_order_within() -> None:
    def program(rank: int, size: int) -> list[float]:
        other = dist.new_group([0, 1])
        if rank == 0:
            for number, (group, tag) in enumerate([(None, 0), (None, 7), (other, 0), (None, 0)]):
                dist.isend(torch.tensor([float(number)]), 1, group=group, tag=tag)
            dist.barrier()
            return []
        got = [torch.zeros(1) for _ in range(4)]
        for tensor, (group, tag) in zip(got, [(other, 0), (None, 0), (None, 0), (None, 7)], strict=True):
            dist.recv(tensor, 0, group=group, tag=tag)
        dist.barrier()
        return [tensor.item() for tensor in got]

    assert run(program).returned[1] == [2.0, 0.0, 3.0, 1.0]


def test_a_message_may_be_received_in_another_shape_and_not_in_another_size() -> None:
    def program(rank: int, size: int, into: torch.Tensor) -> object:
        if rank == 0:
            dist.send(torch.arange(6.0), 1)
            return None
        dist.recv(into, 0)
        return into.tolist()

    assert run(lambda rank, size: program(rank, size, torch.zeros(2, 3))).returned[1] == [[0, 1, 2], [3, 4, 5]]
    for into, what in ((torch.zeros(7), "number of elements"), (torch.zeros(6, dtype=torch.float64), "dtype")):
        text = failed(lambda rank, size, into=into: program(rank, size, into), "mismatch")  # type: ignore[misc]
        assert f"message #0 from rank 0 to rank 1, tag 0, differs between its members in {what}" in text


def test_two_sends_that_wait_for_each_other_need_a_buffer() -> None:
    """With one they complete, so that is tried: the failure says that the hang is the backend's choice."""

    def program(rank: int, size: int) -> None:
        tensor = torch.full((3,), float(rank))
        dist.send(tensor, 1 - rank)
        dist.recv(tensor, 1 - rank)
        assert tensor[0] == 1 - rank

    assert "ring: rank 0 waits for rank 1 waits for rank 0" in failed(program, "unsafe")


@pytest.mark.parametrize("tags", [(3, 4), (0, 0)])
def test_a_message_that_no_buffer_helps_is_a_deadlock(tags: tuple[int, int]) -> None:
    def program(rank: int, size: int) -> None:
        if rank == 0 and tags[0]:
            dist.send(torch.ones(3), 1, tag=tags[0])
        if rank == 1:
            dist.recv(torch.ones(3), 0, tag=tags[1])

    text = failed(program, "deadlock")
    assert f"recv(float32[3]) #0 from rank 0 to rank 1, tag {tags[1]} was never sent by rank 0" in text


def test_a_root_that_leaves_its_broadcast_early_is_let_go_too_and_its_values_are_those_it_had() -> None:
    def program(rank: int, size: int) -> object:
        tensor = torch.full((2,), float(rank))
        if rank == 0:
            dist.broadcast(tensor, 0)
            tensor.fill_(9)
            dist.send(tensor, 1)
            return None
        got = torch.zeros(2)
        dist.recv(got, 0)
        dist.broadcast(tensor, 0)
        assert (got[0], tensor[0]) == (9, 0)
        return None

    assert "in broadcast(float32[2]) root=0 #0 on ranks [0, 1], waiting for rank 1" in failed(program, "unsafe")


def test_a_message_that_nobody_receives_is_unsafe_though_all_ranks_end() -> None:
    def program(rank: int, size: int) -> None:
        if rank == 0:
            dist.isend(torch.ones(2), 1)

    assert "was never received by rank 1" in failed(program, "unsafe")


def test_any_source_takes_what_is_there_says_who_sent_it_and_is_no_proof() -> None:
    def program(rank: int, size: int) -> list[tuple[int, float]]:
        if rank:
            dist.send(torch.tensor([float(rank)]), 0)
            return []
        got = []
        for _ in range(size - 1):
            tensor = torch.zeros(1)
            got.append((dist.recv(tensor), tensor.item()))
        return got

    done = run(program, 4)
    assert sorted(done.returned[0]) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert done.voids == ("a message was received from any source",)
    assert {call.op for call in done.traces[0]} == {"recv"}


def test_a_receive_of_one_source_after_one_of_any_is_numbered_by_what_it_got() -> None:
    def program(rank: int, size: int) -> list[float]:
        got = [torch.zeros(1), torch.zeros(1)]
        if rank == 0:
            dist.recv(got[0])
            dist.recv(got[1], 1)
        else:
            dist.send(torch.tensor([5.0]), 0)
            dist.send(torch.tensor([6.0]), 0)
        return [tensor.item() for tensor in got]

    done = run(program)
    assert not any(call.asynchronous for trace in done.traces for call in trace)
    assert done.returned[0] == [5.0, 6.0]
    assert [call.sequence for call in done.traces[0]] == [0, 1]


def test_a_buffer_that_is_sent_must_not_be_written_before_the_wait() -> None:
    def program(rank: int, size: int) -> None:
        tensor = torch.ones(2)
        if rank == 0:
            work = dist.isend(tensor, 1)
            tensor.zero_()
            work.wait()
        else:
            dist.recv(tensor, 0)

    assert "rank 0 wrote to an input of shape [2] of a call before waiting for it" in failed(program, "in-flight")


def test_objects_and_a_monitored_barrier() -> None:
    def program(rank: int, size: int) -> object:
        given: list[object] = [{"of": rank}]
        dist.send_object_list(given, 1) if rank == 0 else dist.recv_object_list(given, 0)
        dist.monitored_barrier()
        return given

    assert run(program).returned == ([{"of": 0}], [{"of": 0}])

    def one_stays_away(rank: int, size: int) -> None:
        if rank != 1:
            dist.monitored_barrier()

    assert "monitored_barrier() #0 on ranks [0, 1, 2] was never called by rank 1" in failed(
        one_stays_away, "deadlock", 3
    )


_SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""By name, how many stages a rank has."""
_AS_A_V = ("ZBVZeroBubble", "DualPipeV")


def test_the_schedules_are_all_that_torch_has() -> None:
    from torch.distributed.pipelining import schedules  # imports torch._dynamo

    bases = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    kinds = [kind for kind in vars(schedules).values() if isinstance(kind, type) and issubclass(kind, bases)]
    names = {kind.__name__.removeprefix("Schedule") for kind in kinds if kind.__name__.startswith("Schedule")}
    assert names == _SCHEDULES.keys()


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(name, stages, marks=[connects_stages_of_one_rank] if name in _AS_A_V else [], id=name)
        for name, stages in _SCHEDULES.items()
    ],
)
def test_every_pipeline_schedule_gives_the_gradients_of_one_device(name: str, stages: int) -> None:
    from torch.distributed.pipelining import PipelineStage, schedules

    schedule = getattr(schedules, f"Schedule{name}")

    def layers(count: int) -> list[nn.Linear]:
        """Whole numbers, small ones: every sum of them is exact, in whatever order."""
        made = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(count)]
        for place, layer in enumerate(made):
            for parameter in layer.parameters():
                parameter.data = (torch.arange(parameter.numel()) + place).fmod(5).sub(2).view_as(parameter).double()
        return made

    batch = torch.arange(32, dtype=torch.float64).view(8, 4).fmod(7)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().sum()

    def program(rank: int, size: int) -> dict[int, torch.Tensor]:
        whole = layers(size * stages)
        mine = [rank, 2 * size - 1 - rank] if name in _AS_A_V else range(rank, size * stages, size)
        parts = [PipelineStage(whole[place], place, len(whole), torch.device("cpu")) for place in mine]
        runner = schedule(parts[0] if stages == 1 else parts, n_microbatches=4, loss_fn=loss, scale_grads=False)
        first = [batch] if 0 in mine else []
        runner.step(*first, target=batch if len(whole) - 1 in mine else None)
        return {place: whole[place].weight.grad for place in mine}

    done = run(program, 2).check()
    assert done.voids == ()
    alone = layers(2 * stages)
    loss(nn.Sequential(*alone)(batch), batch).backward()
    for place, grad in {**done.returned[0], **done.returned[1]}.items():
        assert torch.equal(grad, alone[place].weight.grad), place


def test_a_pipeline_may_receive_what_nobody_reads_in_one_buffer() -> None:
    """As the schedules of torch 2.11 open their connections; a program that does so by itself is reported."""
    from torch.distributed.pipelining import PipelineStage, schedules

    def _initialize_stage(stage: PipelineStage) -> None:
        schedules._wait_batch_p2p(schedules._batch_p2p(stage._get_init_p2p_neighbors_ops()))

    def by_itself(stage: PipelineStage) -> None:
        for work in dist.batch_isend_irecv(stage._get_init_p2p_neighbors_ops()):
            work.wait()

    def program(rank: int, size: int, connect: Callable[[PipelineStage], None]) -> None:
        connect(PipelineStage(nn.Linear(4, 4), rank, size, torch.device("cpu")))

    run(lambda rank, size: program(rank, size, _initialize_stage), 3).check()
    failure = run(lambda rank, size: program(rank, size, by_itself), 3).failure
    assert failure is not None
    assert failure.text.startswith("rank 1 wrote to an output of shape [1] of a call before waiting for it")
