"""A keeper's connection tells the driver at once that the keeper's process has ended, and nothing else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from fsdpcheck.engines._real import launch, post
from fsdpcheck.engines._real.contact import Contact, Signs
from fsdpcheck.engines._real.lifeline import Lifeline, Lifelines


class Values:
    """A store."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.numbers: dict[str, int] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, by: int) -> int:
        self.numbers[key] = self.numbers.get(key, 0) + by
        return self.numbers[key]


@pytest.fixture
def store() -> Values:
    return Values()


@pytest.fixture
def driver(store: Values) -> Iterator[Lifelines]:
    made = Lifelines(store, launch.LOOPBACK)
    yield made
    made.close()


def held(store: Values, rank: int, driver: Lifelines) -> socket.socket:
    """The keeper's end, once the driver has it."""
    line = Lifeline(store, rank)
    line.hold()
    assert line._line is not None
    while rank not in driver._lines:
        assert driver.ended() == ()
    return line._line


def ended(driver: Lifelines) -> tuple[int, ...]:
    """The next that end; a kernel takes its time."""
    while not (found := driver.ended()):
        pass
    return found


def test_who_ends_is_told_once_and_the_others_are_there(store: Values, driver: Lifelines) -> None:
    lines = {rank: held(store, rank, driver) for rank in (2, 3, 700)}
    lines[3].close()
    assert ended(driver) == (3,)
    assert driver.ended() == ()
    lines[700].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # it is reset, and not closed
    lines[700].close()
    assert ended(driver) == (700,)
    lines[2].close()


def test_a_stranger_is_no_keeper(store: Values, driver: Lifelines) -> None:
    line = held(store, 2, driver)
    host, port, token = store.values["lifelines"].split()
    silent = socket.create_connection((host, int(port)))
    wrong = socket.create_connection((host, int(port)))
    wrong.sendall(bytes(16) + (2).to_bytes(4, "big"))
    wrong.settimeout(10)
    while driver._strangers == [] or len(driver._strangers) > 1:
        assert driver.ended() == ()
    assert wrong.recv(1) == b"", "it is sent away"
    for stranger in (wrong, silent):
        stranger.close()
    while driver._strangers:
        assert driver.ended() == ()
    assert (len(token), list(driver._lines)) == (32, [2])
    line.close()


def test_where_no_connection_can_be_made_nothing_is_said(store: Values) -> None:
    elsewhere = Lifelines(store, "192.0.2.1")  # TEST-NET-1 (RFC 5737), nobody's
    assert (elsewhere.ended(), store.values) == ((), {})
    line = Lifeline(store, 2)
    line.hold()
    assert line._line is None, "there is nothing to connect to yet"
    closed = Lifelines(store, launch.LOOPBACK)
    closed.close()
    line.hold()
    line.hold()
    assert line._line is None, "it is refused, and is not tried again"


def test_contact_is_lost_with_the_process_and_not_after_a_minute_of_silence(store: Values, driver: Lifelines) -> None:
    known = [launch.Hello(rank, node, f"host{node}", os.getpid(), 0) for rank, node in ((0, 0), (1, 1), (2, 1))]
    now = iter(range(1000))
    contact = Contact(post.DriversStore(store), known, clock=lambda: float(next(now)), lifelines=driver)
    lines = {rank: held(store, rank, driver) for rank in (1, 2)}
    for rank in (1, 2):
        Signs(store, rank).give()
    assert dict(contact.lost()) == {}
    lines[2].close()
    while not contact.lost():
        for rank in (1, 2):  # both are heard
            store.add(f"signs of {rank}", 1)
    assert (dict(contact.lost()), contact.is_over()) == ({2: "its process has ended"}, True)
    assert contact.why_gone(1) == ""
    lines[1].close()


def test_a_keeper_says_that_it_was_told_to_end_before_it_ends(store: Values, driver: Lifelines) -> None:
    known = [launch.Hello(rank, rank, f"host{rank}", os.getpid(), 0) for rank in (0, 1)]
    now = iter(range(1000))
    contact = Contact(post.DriversStore(store), known, clock=lambda: float(next(now)), lifelines=driver)
    line = held(store, 1, driver)
    Signs(store, 1).leave()
    line.close()
    assert ended(driver) == (1,)
    assert dict(contact.lost()) == {1: "torchrun told it to end"}
