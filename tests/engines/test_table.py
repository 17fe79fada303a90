"""The table of real ranks: what a rank publishes is read back, and only a consistent reading counts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from fsdpcheck.engines._real import shared_table
from fsdpcheck.engines._real.shared_table import Row, Table
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution.trace import Collective


def call(sequence: int) -> Collective:
    return Collective("all_reduce", (0, 1), "0", sequence, "sum")


@pytest.fixture
def table(tmp_path: Path) -> Table:
    shared_table.create(tmp_path / "table", 2)
    return Table(tmp_path / "table", 2)


@pytest.fixture
def rows(tmp_path: Path, table: Table) -> list[Row]:
    return [Row(tmp_path / "table", rank) for rank in range(2)]


def test_calls_are_read_back_in_order_as_they_come(table: Table, rows: list[Row]) -> None:
    rows[1].begin(1)
    for sequence in range(3):
        assert rows[1].issue(call(sequence)) == sequence
        calls = tuple(call(number) for number in range(sequence + 1))
        assert table.trace(1, table.read()[1]) == calls
    assert table.trace(0, table.read()[0]) == ()


def test_an_older_header_gives_the_calls_of_its_time(table: Table, rows: list[Row]) -> None:
    rows[0].begin(1)
    rows[0].issue(call(0))
    before = table.read()[0]
    rows[0].issue(call(1))
    assert table.trace(0, table.read()[0]) == (call(0), call(1))
    assert table.trace(0, before) == (call(0),)


def test_a_new_run_forgets_the_calls_of_the_last(table: Table, rows: list[Row]) -> None:
    rows[0].begin(1)
    rows[0].issue(call(0))
    table.trace(0, table.read()[0])
    rows[0].begin(2)
    rows[0].issue(call(7))
    header = table.read()[0]
    assert (header.run, table.trace(0, header)) == (2, (call(7),))


def test_a_rank_is_blocked_only_while_it_waits(table: Table, rows: list[Row]) -> None:
    rows[0].begin(1)
    rows[0].issue(call(0))
    assert table.read()[0].blocked_in is None
    with rows[0].blocked(0):
        assert table.read()[0].blocked_in == 0
        with rows[0].blocked(0):
            pass
        assert table.read()[0].blocked_in == 0
    assert table.read()[0].blocked_in is None


def test_a_rank_with_threads_is_blocked_while_each_of_them_waits(table: Table, rows: list[Row]) -> None:
    """A thread that computes may yet come to what another rank waits for."""
    rows[0].begin(1)
    for sequence in range(2):
        rows[0].issue(call(sequence))
    waits, goes_on = threading.Event(), threading.Event()

    def helped() -> None:
        goes_on.wait()
        with rows[0].blocked(1):
            waits.set()
            goes_on.clear()
            goes_on.wait()

    thread = threading.Thread(target=helped)
    thread.start()
    with rows[0].blocked(0):
        assert table.read()[0].blocked == (), "one of its threads waits for none"
        goes_on.set()
        waits.wait()
        assert table.read()[0].blocked == (0, 1), "the program's call comes first"
    assert table.read()[0].blocked == (), "the program goes on, whatever the thread does"
    goes_on.set()
    thread.join()
    with rows[0].blocked(0):
        assert table.read()[0].blocked == (0,), "a thread that has ended keeps nothing"


def test_calls_of_other_threads_are_counted(table: Table, rows: list[Row]) -> None:
    rows[0].begin(1)
    rows[0].issue(call(0))
    thread = threading.Thread(target=rows[0].issue, args=(call(1),))
    thread.start()
    thread.join()
    assert table.read()[0].elsewhere == 1
    rows[0].begin(2)
    assert table.read()[0].elsewhere == 0


def test_a_call_that_was_withdrawn_is_no_call(table: Table, rows: list[Row]) -> None:
    rows[0].begin(1)
    for sequence in range(3):
        rows[0].issue(call(sequence))
    rows[0].withdraw(1)
    rows[0].issue(call(3))
    assert shared_table.performed(table.trace(0, table.read()[0])) == (call(0), call(2), call(3))


def test_every_change_moves_the_counter_forward(table: Table, rows: list[Row]) -> None:
    counters = [table.read()[0].counter]
    for change in (lambda: rows[0].begin(1), lambda: rows[0].issue(call(0)), rows[0].end):
        change()
        counters.append(table.read()[0].counter)
    assert counters == sorted(set(counters))
    assert all(counter % 2 == 0 for counter in counters)


def test_a_snapshot_is_refused_while_a_rank_changes_its_row(table: Table, rows: list[Row]) -> None:
    assert table.snapshot() is not None
    with rows[1]._change():
        assert table.snapshot() is None
    assert table.snapshot() is not None


def test_a_snapshot_is_refused_when_a_rank_moved_between_its_readings(
    table: Table, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = table.read

    def read_and_move() -> tuple[shared_table.Header, ...]:
        headers = read()
        rows[0].issue(call(0))
        return headers

    monkeypatch.setattr(table, "read", read_and_move)
    assert table.snapshot() is None


def test_a_full_row_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_table, "ROW", 4096)
    shared_table.create(tmp_path / "small", 1)
    row = Row(tmp_path / "small", 0)
    row.begin(1)
    fill = (row.issue(call(sequence)) for sequence in range(4096))
    with pytest.raises(FsdpcheckError, match="the row is full"):
        list(fill)
