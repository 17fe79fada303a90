"""Ways by which ranks reach each other that are not searched: a program that uses one is told so, and not proved."""

from __future__ import annotations

import fcntl
import io
import multiprocessing
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from fsdpcheck import search

Program = Callable[[Path, int], object]
QUEUE: queue.Queue[int] = queue.Queue()
EVENT, LOCK, ARRAY, BUFFER = threading.Event(), threading.Lock(), np.zeros(2), io.BytesIO()
PIPE = multiprocessing.get_context("fork").SimpleQueue()


def joined(program: Program, folder: Path) -> Callable[[], object]:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(folder, dist.get_rank())

    return whole


def by_a_socket(folder: Path, rank: int) -> object:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(str(folder / f"{rank}"))


def by_a_pipe(folder: Path, rank: int) -> object:
    PIPE.put(rank)
    dist.barrier()
    return PIPE.get()


def by_a_process(folder: Path, rank: int) -> object:
    if rank == 0:
        subprocess.run(["touch", str(folder / "there")], check=True)
    return os.access(folder / "there", os.F_OK)


def by_a_lock(folder: Path, rank: int) -> object:
    with (folder / "of.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_UN)


def by_a_key_in_time(folder: Path, rank: int) -> object:
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.set("there", "")
    store.wait(["there"], timedelta(milliseconds=1))
    return None


def by_a_work_in_time(folder: Path, rank: int) -> object:
    work = dist.barrier(async_op=True)
    assert work is not None
    return work.wait(timedelta(milliseconds=1))


def by_a_future(folder: Path, rank: int) -> object:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    return work.get_future().done()


@pytest.mark.parametrize(
    ("program", "void"),
    [
        (by_a_socket, "a rank used a socket"),
        (by_a_pipe, "ranks shared a pipe"),
        (by_a_process, "a rank started another process"),
        (by_a_lock, "a rank locked a file"),
        (by_a_key_in_time, "a rank waited with a time-out, which nothing here takes"),
        (by_a_work_in_time, "a work was waited for with a time-out, which nothing here takes"),
        (by_a_future, "a future of a work was polled"),
    ],
)
def test_a_way_that_is_not_searched_is_a_void(program: Program, void: str, tmp_path: Path) -> None:
    found = search(joined(program, tmp_path), 2)
    assert found.simulation.failure is None, found.simulation.failure.text
    assert void in found.voids
    assert not found.proved


@pytest.mark.parametrize(
    ("write", "put_back", "name"),
    [
        (lambda: QUEUE.put(1), QUEUE.queue.clear, "QUEUE"),
        (EVENT.set, EVENT.clear, "EVENT"),
        (lambda: LOCK.acquire(blocking=False), LOCK.release, "LOCK"),
        (lambda: ARRAY.put(0, 1.0), lambda: ARRAY.fill(0.0), "ARRAY"),
        (lambda: BUFFER.write(b"a"), lambda: BUFFER.truncate(BUFFER.seek(0)), "BUFFER"),
    ],
)
def test_an_object_of_the_module_that_ranks_share_and_write_to_is_a_void(
    write: Callable[[], object], put_back: Callable[[], object], name: str, tmp_path: Path
) -> None:
    def program(folder: Path, rank: int) -> None:
        if rank == 0:
            write()
        dist.barrier()
        if rank == 0:
            put_back()

    assert search(joined(program, tmp_path), 2).voids == (f"ranks wrote to what they share: {__name__}.{name}",)


def test_a_future_of_a_work_that_is_only_waited_for_is_none(tmp_path: Path) -> None:
    def program(folder: Path, rank: int) -> object:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        assert work is not None
        return work.get_future().then(lambda done: done.value()[0].item()).wait()

    assert search(joined(program, tmp_path), 2).proved


@pytest.mark.nightly
def test_what_the_workers_of_a_loader_use_is_none(tmp_path: Path) -> None:
    def program(folder: Path, rank: int) -> object:
        loader = DataLoader(list(range(4)), batch_size=2, num_workers=1, multiprocessing_context="fork")
        total = torch.tensor(float(sum(int(batch.sum()) for batch in loader)))
        dist.all_reduce(total)
        return total.item()

    found = search(joined(program, tmp_path), 2)
    assert found.simulation.failure is None, found.simulation.failure.text
    told = "socket", "pipe", "process", "locked"
    assert not [void for void in found.voids if any(word in void for word in told)], found.voids
