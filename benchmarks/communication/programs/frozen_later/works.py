"""Works and their buffers: handles that are lost, results that are read or overwritten too early."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from benchmarks.communication.pairs import join, pair


@pair("request lifecycle", 2, "never waited")
def any_wait_is_enough(faulty: bool) -> object:
    """``any`` in place of ``all`` stops at the first wait that says True."""
    rank, _ = join()
    buckets = [torch.full((2,), float(rank + at)) for at in range(3)]
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]  # here
    waited = (work.wait() for work in works)
    done = any(waited) if faulty else all(list(waited))
    return [done, buckets[0].tolist()]


@pair("request lifecycle", 2, "never waited")
def handles_by_the_size_of_their_bucket(faulty: bool) -> object:
    """Handles are kept by the size of their bucket, and two buckets have the same."""
    rank, _ = join()
    buckets = [torch.full((size,), float(rank + size)) for size in (3, 2, 3)]
    handles = {}
    for at, bucket in enumerate(buckets):
        handles[bucket.numel() if faulty else at] = dist.all_reduce(bucket, async_op=True)  # here
    for handle in reversed(handles.values()):
        handle.wait()
    return [buckets[1].tolist(), buckets[2].tolist()]


@pair("request lifecycle", 2, "never waited")
def functional_reduction_taken_for_one_in_place(faulty: bool) -> object:
    """A functional collective returns its result; the caller goes on with what it put in."""
    rank, size = join()
    loss = torch.tensor([float(rank)])
    reduced = functional.all_reduce(loss, "sum", list(range(size)))  # here
    return (loss if faulty else reduced).item()


@pair("read before wait", 2, "in-flight", "order")
def update_skipped_where_the_sum_is_late(faulty: bool) -> object:
    """A delayed gradient is waited for only if it is there already, and read in any case."""
    rank, _ = join()
    weight, gradient = torch.ones(2), torch.full((2,), float(rank + 1))
    work = dist.all_reduce(gradient, async_op=True)  # here
    if work.is_completed() or not faulty:
        work.wait()
    weight -= 0.5 * gradient  # here
    if faulty:
        work.wait()
    return weight.tolist()


@pair("read before wait", 2, "in-flight")
def numbers_seen_through_an_array(faulty: bool) -> object:
    """The metrics are a NumPy array over the same memory, which is looked at before their reduction ended."""
    rank, _ = join()
    metrics = torch.tensor([float(rank), 2.0])
    seen = metrics.numpy()
    work = dist.all_reduce(metrics, async_op=True)  # here
    if not faulty:
        work.wait()
    hits = float(seen[0])
    if faulty:
        work.wait()  # here
    return hits


@pair("write in flight", 2, "in-flight", ranks=(0,))
def batch_filled_through_an_array(faulty: bool) -> object:
    """The loader fills the memory of the batch through NumPy while the last one is still sent from it."""
    rank, _ = join()
    batch = torch.zeros(4)
    if rank == 1:
        first, second = torch.empty(4), torch.empty(4)
        dist.recv(first, src=0)
        dist.recv(second, src=0)
        return [first.tolist(), second.tolist()]
    memory = batch.numpy()
    memory[:] = 1.0
    sending = dist.isend(batch, dst=1)  # here
    assert sending is not None
    if not faulty:
        sending.wait()
    memory[:] = 2.0
    if faulty:
        sending.wait()  # here
    dist.send(batch, dst=1)
    return None


@pair("write in flight", 2, "in-flight")
def result_of_an_addition_laid_over_an_input(faulty: bool) -> object:
    """``out=`` names one of the tensors of a list that is still being scattered and reduced."""
    rank, size = join()
    shares = [torch.full((2,), float(rank + at)) for at in range(size)]
    mine = torch.empty(2)
    work = dist.reduce_scatter(mine, shares, async_op=True)  # here
    if not faulty:
        work.wait()
    torch.add(shares[0], 1.0, out=shares[1])  # here
    if faulty:
        work.wait()
    return mine.tolist()


@pair("local concurrency", 2, "in-flight", ranks=(0,))
def one_more_pending_than_there_are_buffers(faulty: bool) -> object:
    """Two buffers take turns, and sends may be pending until there are too many: one more than there are buffers."""
    rank, _ = join()
    steps = 4
    if rank == 1:
        came = torch.empty(steps, 2)
        for row in came:
            dist.recv(row, src=0)
        return came.sum(dim=1).tolist()
    buffers, pending = [torch.empty(2), torch.empty(2)], deque()
    for step in range(steps):
        if len(pending) == len(buffers) + faulty:
            pending.popleft().wait()
        buffers[step % 2].fill_(float(step))  # here
        pending.append(dist.isend(buffers[step % 2], dst=1))  # here
    while pending:
        pending.popleft().wait()
    return None


@pair("local decision", 2, "mismatch", "order")
def buckets_handled_as_they_are_complete(faulty: bool) -> object:
    """Each rank goes on with whichever bucket it finds complete first, and gathers what it made of it."""
    rank, size = join()
    buckets = [torch.full((at + 1,), float(rank + at)) for at in range(2)]
    works = {at: dist.all_reduce(bucket, async_op=True) for at, bucket in enumerate(buckets)}
    gathered = [torch.empty(size * bucket.numel()) for bucket in buckets]
    while works:
        for at in list(works):
            if works[at].is_completed():
                works.pop(at).wait()
                if faulty:
                    dist.all_gather_into_tensor(gathered[at], buckets[at] * (rank + 1))  # here
    for at, bucket in enumerate(buckets):
        if not faulty:
            dist.all_gather_into_tensor(gathered[at], bucket * (rank + 1))
    return [values.tolist() for values in gathered]


@pair("resource leak", 2, "leak")
def default_of_a_cache_made_each_time(faulty: bool) -> object:
    """``setdefault`` evaluates its default whether the key is there or not: each call makes a group."""
    rank, size = join()
    groups: dict[str, dist.ProcessGroup] = {}

    def mean(value: float) -> float:
        if faulty:
            group = groups.setdefault("metrics", dist.new_group(list(range(size))))  # here
        elif "metrics" in groups:
            group = groups["metrics"]
        else:
            group = groups["metrics"] = dist.new_group(list(range(size)))
        total = torch.tensor([value])
        dist.all_reduce(total, group=group)
        return total.item() / size

    return [mean(float(batch + rank)) for batch in range(4)]


@pair("shutdown", 2, "deadlock", ranks=(1,))
def group_closed_by_a_context_that_swallows(faulty: bool) -> object:
    """A rank's validation fails; the context around it ends the group and swallows what was raised."""
    rank, _ = join()

    class Session:
        def __enter__(self) -> Session:
            return self

        def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
            if kind is not None:
                dist.destroy_process_group()  # here
            return True

    loss = torch.tensor([float(rank)])
    with Session():
        if faulty and rank == 1:
            raise ValueError("validation")
        dist.all_reduce(loss)  # here
    return loss.item()
