"""Programs under every order of ranks that matters: found, proved, bounded; how many orders that takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdpcheck import Search, search
from fsdpcheck.errors import UsageError
from fsdpcheck.simulation import store_looks
from fsdpcheck.simulation.decisions import Decisions
from fsdpcheck.simulation.search import some_orders
from fsdpcheck.simulation.simulate import Options, simulate, simulated

Program = Callable[[int, int], object]


def joined(program: Program) -> Callable[[], object]:
    def whole() -> object:
        dist.init_process_group("gloo")
        return program(dist.get_rank(), dist.get_world_size())

    return whole


def tried(program: Program, world_size: int = 3) -> Search:
    return search(joined(program), world_size)


def store() -> dist.Store:
    found = dist.distributed_c10d._get_default_store()
    assert isinstance(found, dist.Store)
    return found


def gathers_from_anybody(rank: int, size: int) -> object:
    if rank:
        dist.send(torch.tensor([rank]), 0)
        return None
    got = [torch.zeros(1, dtype=torch.int64) for _ in range(size - 1)]
    return sorted(dist.recv(tensor) for tensor in got), sum(tensor.item() for tensor in got)


def counts_in_a_store(rank: int, size: int) -> object:
    store().add("arrived", 1)
    dist.barrier()
    return store().get("arrived")


def hands_over_in_a_store(rank: int, size: int) -> object:
    """Each key is set once, before it is read: one order."""
    if rank == 0:
        store().set("address", "here")
    return store().get("address")


def polls(rank: int, size: int) -> object:
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    return tensor.item()


@pytest.mark.parametrize(
    ("program", "schedules"),
    [
        (gathers_from_anybody, 2),
        (counts_in_a_store, 6),
        (hands_over_in_a_store, 1),
        (lambda rank, size: dist.barrier(), 1),
    ],
)
def test_a_program_that_is_right_in_every_order_is_proved_so_with_as_many_as_differ(
    program: Program, schedules: int
) -> None:
    found = tried(program)
    assert found.proved, found
    assert found.schedules == schedules


def test_polls_are_bounded_and_not_proved() -> None:
    found = tried(polls, 2)
    assert (found.complete, found.proved, found.schedules) == (True, False, 4)
    assert found.voids == ("a work was polled: the answer 'not yet' was tried once a work",)


def expects_the_first(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.ones(1), 0)
        return
    tensor = torch.ones(1)
    first = dist.recv(tensor)
    assert first == 1, "the second was faster"
    dist.recv(tensor, 2)


def waits_for_one_that_was_received(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.ones(1), 0)
    else:
        dist.recv(torch.ones(1))
        dist.recv(torch.ones(1), 2)


def numbers_itself(rank: int, size: int) -> int:
    return store().add("tickets", 1)


def loses_an_update(rank: int, size: int) -> object:
    if rank == 0:
        store().set("total", "0")
    dist.barrier()
    store().set("total", str(int(store().get("total")) + 1))
    dist.barrier()
    return store().get("total")


def trusts_a_poll(rank: int, size: int) -> bool:
    work = dist.barrier(async_op=True)
    ready = work.is_completed()
    work.wait()
    return ready


@pytest.mark.parametrize(
    ("program", "kind", "order"),
    [
        (expects_the_first, "raised", ["rank 0: receive from any source, tag 0 #0 from rank 2"]),
        (
            waits_for_one_that_was_received,
            "deadlock",
            ["rank 0: receive from any source, tag 0 #0 from rank 2"],
        ),
        (numbers_itself, "order", None),
        (loses_an_update, "order", None),
        (trusts_a_poll, "order", None),
    ],
)
def test_an_order_that_fails_is_found_with_the_decisions_it_needs_and_is_had_again(
    program: Program, kind: str, order: list[str] | None
) -> None:
    assert simulate(joined(program), 3, show=False).failure is None, "the first order hides it"
    found = tried(program)
    assert found.simulation.failure is not None
    assert found.simulation.failure.kind == kind
    assert len(found.order) <= 2
    assert order is None or list(found.order) == order
    if kind != "order":
        again = simulated(joined(program), 3, (), {}, Options(show=False, decisions=Decisions(found.order)))
        assert again.failure is not None
        assert found.simulation.failure.text.startswith(
            f"{again.failure.text}\n  decided  {found.order[0]}, at {__file__}:"
        )


def test_decisions_are_known_by_name_so_they_survive_an_edit() -> None:
    """More messages before, of another tag and from any source too: the same decision is taken later."""
    (decision,) = tried(expects_the_first).order

    def edited(rank: int, size: int) -> None:
        for _ in range(2):
            dist.send(torch.ones(1), 0, tag=5) if rank == 1 else dist.recv(torch.ones(1), tag=5) if not rank else None
        store().add("started", 1)
        expects_the_first(rank, size)

    again = simulated(joined(edited), 3, (), {}, Options(show=False, decisions=Decisions([decision])))
    assert again.failure is not None
    assert "the second was faster" in again.failure.text


def test_the_most_is_kept_and_drawn_orders_find_it_too(tmp_path: Path) -> None:
    found = search(joined(counts_in_a_store), 3, most=4, drawn=0)
    assert (found.schedules, found.complete, found.proved, found.drawn) == (4, False, False, None)

    def once(decisions: Decisions) -> object:
        return simulated(joined(expects_the_first), 3, (), {}, Options(show=False, decisions=decisions))

    drawn = some_orders(once, 20)  # type: ignore[arg-type]
    assert drawn.simulation.failure is not None
    assert json.dumps(drawn.order) == json.dumps(["rank 0: receive from any source, tag 0 #0 from rank 2"])
    for numbers in ({"most": 0}, {"drawn": -1}):
        with pytest.raises(UsageError, match="this is no number of schedules"):
            search(joined(counts_in_a_store), 2, **numbers)


def test_a_program_that_is_not_deterministic_is_not_proved() -> None:
    runs: list[int] = []

    def program(rank: int, size: int) -> None:
        runs.append(rank)
        for _ in range(1 + (len(runs) > 2)):
            store().add("count", 1)

    assert any("not deterministic" in void for void in tried(program, 2).voids)


def test_ranks_that_return_no_number_return_the_same() -> None:
    def program(rank: int, size: int) -> object:
        store().add("count", 1)
        return [float("nan"), {"loss": float("nan")}]

    assert tried(program, 2).proved


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_what_is_read_in_flight_by_nothing_that_can_be_watched_is_found_by_its_value(dtype: torch.dtype) -> None:
    def program(rank: int, waits: bool) -> object:
        mine, other = torch.full((2,), rank, dtype=dtype), torch.full((2,), rank, dtype=dtype)
        seen = mine.numpy()
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (mine, other)]
        early = float(seen[1])
        for work in works:
            work.wait()
        return float(seen[1]) if waits else early

    failure = tried(lambda rank, _: program(rank, waits=False), 2).simulation.failure
    assert failure is not None
    assert (failure.kind, [state.rank for state in failure.ranks]) == ("in-flight", [0, 1])
    assert f"{__file__}:{program.__code__.co_firstlineno + 3}" in failure.text
    assert tried(lambda rank, _: program(rank, waits=True), 2).proved


def spins_until_all_are_there(rank: int, size: int) -> object:
    store().add("there", 1)
    while store().add("there", 0) < size:
        pass
    return rank


def gives_up_to_look(rank: int, size: int) -> object:
    """Nobody sets the key; the others wait for this rank meanwhile."""
    found = [store().check(["never"]) for _ in range(4)] if rank == 0 else []
    dist.barrier()
    return found


@pytest.mark.parametrize("program", [spins_until_all_are_there, gives_up_to_look])
def test_a_look_into_a_store_where_nothing_has_changed_waits_for_the_others(program: Program) -> None:
    found = tried(program, 2)
    assert found.simulation.failure is None
    assert found.complete
    assert found.voids == (store_looks.VOID,)
    assert simulate(joined(program), 2, show=False).failure is None
