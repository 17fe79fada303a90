"""Adapters as users write them, loaded as "file.py:attr": an honest one, and one for each way of going wrong.

All train a replicated model and average its gradients, so that the only thing they need is torch.distributed. What is
wrong with one happens once, on one rank, in the middle of a step.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdpcheck.adapters.contract import Batch, Features, Setup

WRONG_RANK = 1
Trouble = Callable[[int], None]


class Averaging:
    """Every rank has the whole model; ``trouble(rank)`` runs between backward and the averaging of gradients."""

    def __init__(self, model: nn.Module, setup: Setup, trouble: Trouble) -> None:
        self._model, self._setup, self._trouble = model, setup, trouble
        self._optimizer = setup.optimizer(model.parameters())

    _drop = True

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad(set_to_none=self._drop)
        for micro in batch.micro_batches:
            losses = self._setup.loss(self._model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        self._trouble(self._setup.rank)
        for parameter in self._trainable():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        self._optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        named = self._model.named_parameters()
        return {name: value.grad.detach().clone() for name, value in named if value.grad is not None}

    def local_tensors(self) -> list[Tensor]:
        return [parameter.detach() for parameter in self._model.parameters()]

    def _trainable(self) -> Sequence[nn.Parameter]:
        return [parameter for parameter in self._model.parameters() if parameter.requires_grad]


class AveragingAdapter:
    """An adapter whose ranks have this trouble."""

    features = Features(promises=frozenset({"plain"}), observables=frozenset({"params", "grads"}))

    def __init__(self, trouble: Trouble) -> None:
        self.name = trouble.__name__
        self._trouble = trouble

    def build(self, model: nn.Module, setup: Setup) -> Averaging:
        return Averaging(model, setup, self._trouble)


def _numbers(count: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.ones(count, dtype=dtype)


@AveragingAdapter
def honest(rank: int) -> None:
    """Nothing is wrong."""


@AveragingAdapter
def killed(rank: int) -> None:
    if rank == WRONG_RANK:
        os.kill(os.getpid(), signal.SIGKILL)


@AveragingAdapter
def killed_without_a_name(rank: int) -> None:
    if rank == WRONG_RANK:
        os.kill(os.getpid(), signal.SIGRTMIN + 1)


@AveragingAdapter
def runs_out_of_memory(rank: int) -> None:
    if rank == WRONG_RANK:
        torch.empty(1 << 50)


@AveragingAdapter
def leaves_at_once(rank: int) -> None:
    if rank == WRONG_RANK:
        os._exit(7)


@AveragingAdapter
def leaves(rank: int) -> None:
    if rank == WRONG_RANK:
        sys.exit(3)


@AveragingAdapter
def segfaults(rank: int) -> None:
    if rank == WRONG_RANK:
        ctypes.string_at(0)


@AveragingAdapter
def raises(rank: int) -> None:
    if rank == WRONG_RANK:
        raise ValueError("a bad shard")


@AveragingAdapter
def handles_a_signal(rank: int) -> None:
    if rank == WRONG_RANK:
        signal.signal(signal.SIGALRM, lambda *_: None)
        torch.autograd.set_detect_anomaly(True)


@AveragingAdapter
def needs_no_handler(rank: int) -> None:
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert not torch.is_anomaly_enabled()


@AveragingAdapter
def sends(rank: int) -> None:
    got = _numbers()
    if rank == 0:
        dist.send(_numbers() * 3, dst=1, tag=5)
    else:
        dist.recv(got, src=0, tag=5)
    assert got[0] == 1 + 2 * rank


@AveragingAdapter
def receives_in_a_batch(rank: int) -> None:
    got = _numbers()
    operations = [dist.P2POp(dist.irecv, got, 1 - rank), dist.P2POp(dist.isend, _numbers() * rank, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got[0] == 1 - rank


@AveragingAdapter
def receives_from_anybody(rank: int) -> None:
    if rank == 0:
        assert dist.recv(_numbers()) == 1
    else:
        dist.send(_numbers(), dst=0)


@AveragingAdapter
def splits(rank: int) -> None:
    dist.group.WORLD.merge_remote_group(None)


@AveragingAdapter
def wants_an_exabyte_of_python(rank: int) -> None:
    if rank == 1:
        bytearray(2**60)


@AveragingAdapter
def speaks_of_memory(rank: int) -> None:
    raise ValueError("DefaultCPUAllocator: can't allocate memory")


@AveragingAdapter
def waits_for_a_message(rank: int) -> None:
    if rank == 1:
        dist.recv(_numbers(), src=0)


@AveragingAdapter
def receives_another_dtype(rank: int) -> None:
    if rank == 0:
        dist.send(_numbers(), dst=1)
    else:
        dist.recv(_numbers(dtype=torch.int64), src=0)


@AveragingAdapter
def one_sided(rank: int) -> None:
    """The classic: a collective under ``if rank == 0``."""
    if rank == 0:
        dist.all_reduce(_numbers(2))


@AveragingAdapter
def late_alone(rank: int) -> None:
    """All but one rank come to a barrier that the other never makes, on a group of its own."""
    group = dist.new_group([0, 1])
    if rank != WRONG_RANK:
        dist.barrier(group)


@AveragingAdapter
def crossed(rank: int) -> None:
    """Two groups, entered in opposite orders."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(_numbers(), group=group)


@AveragingAdapter
def crossed_in_flight(rank: int) -> None:
    """Two groups in opposite orders, but neither rank waits before it has issued both: nothing is wrong."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = groups if rank == 0 else groups[::-1]
    works = [dist.all_reduce(_numbers(), group=group, async_op=True) for group in order]
    for work in works:
        work.wait()


@AveragingAdapter
def objects(rank: int) -> None:
    """Objects of unequal sizes travel in every way that distributed checkpoints use, also on a group of some ranks."""
    some = dist.new_group([1, 2])
    for group, ranks in ((None, list(range(dist.get_world_size()))), (some, [1, 2])):
        if rank not in ranks:
            continue
        root, everyone = ranks[0], [member * "a" for member in ranks]
        gathered: list[Any] = [None] * len(ranks)
        dist.gather_object(rank * "a", gathered if rank == root else None, dst=root, group=group)
        assert gathered == (everyone if rank == root else [None] * len(ranks))
        dist.all_gather_object(gathered, rank * "a", group=group)
        assert gathered == everyone
        scattered: list[Any] = [None]
        dist.scatter_object_list(scattered, everyone if rank == root else None, src=root, group=group)
        assert scattered == [rank * "a"]
        sent: list[Any] = everyone if rank == root else [None] * len(ranks)
        dist.broadcast_object_list(sent, src=root, group=group)
        assert sent == everyone


@AveragingAdapter
def checkpoints(rank: int) -> None:
    """torch.distributed.checkpoint, as it is: a sharded parameter and an object are saved, spoilt and loaded."""
    module = nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0).view(2, 3))
    fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    saved = {"model": module.state_dict(), "step": 3}
    dcp.save(saved, checkpoint_id=folder[0])
    with torch.no_grad():
        module.weight.zero_()
    loaded = {"model": module.state_dict(), "step": 0}
    dcp.load(loaded, checkpoint_id=folder[0])
    assert isinstance(module.weight, DTensor)
    assert torch.equal(module.weight.full_tensor(), torch.arange(6.0).view(2, 3))
    assert loaded["step"] == 3
    if rank == 0:  # all have read: a load ends with a collective
        shutil.rmtree(folder[0])


@AveragingAdapter
def other_shape(rank: int) -> None:
    dist.all_reduce(_numbers(6 if rank == WRONG_RANK else 4))


@AveragingAdapter
def other_op(rank: int) -> None:
    values = _numbers()
    if rank == WRONG_RANK:
        dist.broadcast(values, 0)
    else:
        dist.all_reduce(values)


@AveragingAdapter
def other_reduce_op(rank: int) -> None:
    dist.all_reduce(_numbers(), dist.ReduceOp.MAX if rank == WRONG_RANK else dist.ReduceOp.SUM)


@AveragingAdapter
def other_dtype(rank: int) -> None:
    dist.all_reduce(_numbers(4, torch.float32 if rank == WRONG_RANK else torch.float64))


@AveragingAdapter
def other_root(rank: int) -> None:
    dist.broadcast(_numbers(), src=rank)


@AveragingAdapter
def spins(rank: int) -> None:
    """One rank computes for ever; nothing proves that it will not come."""
    while rank == WRONG_RANK:
        pass


@AveragingAdapter
def leaves_marks(rank: int) -> None:
    """Changes what a process has for all its runs: generators, default dtype, environment, working directory."""
    torch.manual_seed(rank + 99)
    torch.set_default_dtype(torch.float64)
    os.environ["RANK"] = "77"
    os.chdir("/")


@AveragingAdapter
def tells_marks(rank: int) -> None:
    """Raises what a run that leaves marks has left, if anything."""
    fresh = torch.Generator().manual_seed(0).get_state()
    assert torch.default_generator.get_state().equal(fresh)
    assert torch.get_default_dtype() is torch.float32
    assert os.environ["RANK"] == str(rank)
    assert Path.cwd() != Path("/")


@AveragingAdapter
def replaces_a_name(rank: int) -> None:
    """Has a name of torch that no judge computes with stand for something else."""
    if rank == WRONG_RANK:
        torch.utils.checkpoint.checkpoint = print


@AveragingAdapter
def keeps_the_machine(rank: int) -> None:
    """One rank never lets Python run again; not even a thread of its own could tell where it is."""
    if rank == WRONG_RANK:
        ctypes.PyDLL(None).pause()


@AveragingAdapter
def forks(rank: int) -> None:
    """One rank leaves a process behind that never ends."""
    if rank == WRONG_RANK and os.fork() == 0:
        while True:
            signal.pause()


@AveragingAdapter
def sleeps(rank: int) -> None:
    """One rank waits for what never comes and uses no processor time."""
    while rank == WRONG_RANK:
        signal.pause()


_LOCK = threading.Lock()


@AveragingAdapter
def locks(rank: int) -> None:
    """A lock of the module is held across a collective; each process has its own."""
    with _LOCK:
        dist.all_reduce(_numbers(2))


class _Cached:
    @functools.cached_property
    def world(self) -> Tensor:
        """Until Python 3.12 computed under a lock of the class."""
        found = _numbers(1)
        dist.all_reduce(found)
        return found


@AveragingAdapter
def caches(rank: int) -> None:
    assert _Cached().world == dist.get_world_size()


def not_an_adapter() -> None:
    """Has neither features nor build."""


class _Live(Averaging):
    """Shows the very tensors it trains, and clears its gradients in place."""

    _drop = False

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self._model.named_parameters()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: value.grad for name, value in self._model.named_parameters() if value.grad is not None}


class _Copying(Averaging):
    """Gives copies to be projected."""

    def local_tensors(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self._model.parameters()]


class _Built(AveragingAdapter):
    """An adapter of another trainer."""

    def __init__(self, trainer: type[Averaging]) -> None:
        super().__init__(lambda rank: None)
        self.name, self._trainer = trainer.__name__, trainer

    def build(self, model: nn.Module, setup: Setup) -> Averaging:
        return self._trainer(model, setup, self._trouble)


live, copying = _Built(_Live), _Built(_Copying)


@AveragingAdapter
def makes_a_group_alone(rank: int) -> None:
    """One member does not make its group, and goes on; the other waits for it."""
    if rank != WRONG_RANK:
        dist.new_group([0, 1])


@AveragingAdapter
def makes_groups_of_some(rank: int) -> None:
    """As a mesh of several axes does: groups of one or of some ranks, at which others hardly stop."""
    for ranks in ([0], [1], [2], [1, 2], [0], [0, 1, 2]):
        dist.new_group(ranks)


@AveragingAdapter
def makes_other_groups(rank: int) -> None:
    """Ranks name other members of what torch takes for one group."""
    dist.new_group([0, 1] if rank != WRONG_RANK else [0, 1, 2])


@AveragingAdapter
def helped_by_a_thread(rank: int) -> None:
    """A thread comes late to what the other rank waits for, while its own program waits for that rank."""
    mine, theirs = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank != WRONG_RANK:
        dist.all_reduce(_numbers(), group=theirs)
        dist.all_reduce(_numbers(), group=mine)
        return

    def help_late() -> None:
        total = 0
        for number in range(1 << 22):  # some time after the program has begun to wait; no clock is asked
            total += number
        dist.all_reduce(_numbers(), group=theirs)

    thread = threading.Thread(target=help_late)
    thread.start()
    dist.all_reduce(_numbers(), group=mine)
    thread.join()


@AveragingAdapter
def refused_a_group(rank: int) -> None:
    """One rank asks for a group that cannot be; the other waits for it to make one."""
    dist.new_group([0, 1] if rank != WRONG_RANK else [0, 0])


@AveragingAdapter
def refused_by_gloo(rank: int) -> None:
    """One rank calls with what gloo does not do, and raises; the other waits for it in the same call."""
    dist.all_reduce(_numbers(), dist._make_nccl_premul_sum(0.5) if rank == WRONG_RANK else dist.ReduceOp.SUM)
