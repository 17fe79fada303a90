"""Stores of simulated ranks: those that they make themselves too, and all that a store can be asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import simulate
from tests.common.releases import meet


def _tcp(folder: Path) -> dist.Store:
    return dist.TCPStore("127.0.0.1", 29771, 2, is_master=os.environ["RANK"] == "0")


def _file(folder: Path) -> dist.Store:
    return dist.FileStore(str(folder / "store"), 2)


def _of_the_group(folder: Path) -> dist.Store:
    dist.init_process_group("gloo")
    return dist.PrefixStore("mine", dist.distributed_c10d._get_default_store())


@pytest.mark.parametrize("make", [_tcp, _file, _of_the_group])
def test_a_store_is_one_for_all_ranks(make: Callable[[Path], dist.Store], tmp_path: Path) -> None:
    def program() -> object:
        store = make(tmp_path)
        first = os.environ["RANK"] == "0"
        if first:
            store.wait(["there"])
            store.multi_set(["a", "b"], ["1", "2"])
        else:
            store.set("there", "x")
        values = store.multi_get(["a", "b"])
        meet(store, "both", 2)
        store.append("both ranks", "z")
        counted = store.add("count", 1)
        store.set(f"count {counted}", "")
        while not store.check([f"count {3 - counted}"]):
            pass
        meet(store, "before", 2)
        changed = store.compare_set("a", "1", "3") if first else store.get("there")
        deleted = store.delete_key("b") if first else None
        return values, store.get("both ranks"), counted, changed, deleted, store.num_keys() > 4

    one, other = simulate(program, 2, budget=20, show=False).check().returned
    assert one[0] == other[0] == [b"1", b"2"]
    assert {one[2], other[2]} == {1, 2}
    assert one[3:] == (b"3", True, True)
    assert other[3:] == (b"x", None, True)
    assert {one[1], other[1]} <= {b"z", b"zz"}


def test_queues_of_a_store_are_emptied_in_their_order() -> None:
    def program() -> object:
        store = _tcp(Path())
        if os.environ["RANK"] == "0":
            values = [store.queue_pop("q"), store.queue_pop("q")]
            with pytest.raises(dist.QueueEmptyError):
                store.queue_pop("q", block=False)
            return values, store.queue_len("q"), sorted(store.list_keys())
        store.queue_push("q", "1")
        store.queue_push("q", "2")
        return store.set("k", "v")

    assert simulate(program, 2, budget=20).check().returned[0] == ([b"1", b"2"], 0, ["k"])


def test_groups_are_made_with_stores_that_ranks_have_made(tmp_path: Path) -> None:
    def program() -> float:
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", store=_file(tmp_path), rank=rank, world_size=2)
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        port = [dist.TCPStore("localhost", 0, is_master=True).port if rank == 0 else None]  # type: ignore[attr-defined]
        dist.broadcast_object_list(port)
        dist.TCPStore("localhost", port[0] or 0).set(f"{rank}", "")
        return value.item()

    done = simulate(program, 2, budget=20).check()
    assert done.returned == (3.0, 3.0)
    assert not list(tmp_path.iterdir())
    assert "store.set was used after init" in done.voids


def test_a_key_that_nobody_sets_in_a_store_of_theirs_is_a_deadlock() -> None:
    failure = simulate(lambda: _tcp(Path()).get("never"), 2, budget=20).failure
    assert failure is not None
    assert failure.kind == "deadlock"
    assert "store.get() of key 'never'" in failure.text


def test_outside_ranks_stores_are_torchs_own(tmp_path: Path) -> None:
    file, tcp = dist.FileStore, dist.TCPStore
    simulate(lambda: None, 1)
    assert (dist.FileStore, dist.TCPStore) == (file, tcp)
