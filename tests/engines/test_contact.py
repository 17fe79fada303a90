"""Whom a driver and a keeper of torchrun take for cut off: who is silent while somebody listens, and nobody else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from fsdpcheck.case import LayerSpec, MeshSpec, ModelSpec, TrainingCase
from fsdpcheck.engines import torchrun
from fsdpcheck.engines._real import keeper, launch, post
from fsdpcheck.engines._real.contact import SILENCE_SECONDS, Contact, Signs, Silence
from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.mail import Mail
from fsdpcheck.engines._real.remote_workers import FarLink, KeptLink
from fsdpcheck.errors import FsdpcheckError
from fsdpcheck.execution import Execution, Failure, RankResult, RunRequest
from fsdpcheck.session import torchrun as session

START = post.Start(7, Place(0, 2, 1, Path("/nowhere")), 0)
REQUEST = RunRequest(TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(2)), "reference")


class Clock:
    """A second passes at each look."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


class Counts:
    """A store of numbers. ``silent``: it answers no more, as that of a machine which is cut off."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.silent = threading.Event()
        self.again = threading.Event()

    def add(self, key: str, by: int) -> int:
        if self.silent.is_set():
            self.again.wait()
        self.values[key] = self.values.get(key, 0) + by
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = 1

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def hello(rank: int, node: int, pid: int = 0) -> launch.Hello:
    return launch.Hello(rank, node, f"host{node}", pid or os.getpid(), 0)


@pytest.fixture
def counts() -> Iterator[Counts]:
    made = Counts()
    yield made
    made.again.set()


def contact(counts: Counts) -> Contact:
    """Of rank 0 with rank 1 beside it, and ranks 2 and 3 on another node."""
    return Contact(post.DriversStore(counts), [hello(0, 0), hello(1, 0), hello(2, 1), hello(3, 1)], clock=Clock())


def test_who_gives_signs_is_there_however_long_nobody_listens(counts: Counts) -> None:
    clock, silence = Clock(), Silence(Clock())
    signs, here = Signs(counts, 2, clock), contact(counts)
    for _ in range(1000):
        signs.give()
        counts.add("signs of 3", 1)
        assert here.why_gone(2) == ""
    assert silence.look("x") == 0
    clock.now = silence._clock.now = 10_000.0  # type: ignore[attr-defined]
    assert silence.look("x") <= 1, "while nobody looked, nobody was silent"


def test_who_is_silent_for_long_is_lost_and_stays_so(counts: Counts) -> None:
    here, looks = contact(counts), 0
    while not (why := here.why_gone(3)):
        counts.add("signs of 2", 1)
        looks += 1
    assert SILENCE_SECONDS / 2 <= looks <= 2 * SILENCE_SECONDS
    assert (why, here.why_gone(2)) == ("nothing was heard of it for 60 s", "")
    counts.add("signs of 3", 1)
    assert (dict(here.lost()), here.gone(), here.is_over()) == ({3: why}, (), True)


def test_a_keeper_that_is_told_to_end_says_so(counts: Counts) -> None:
    here = contact(counts)
    assert not here.is_over()
    Signs(counts, 2).leave()
    assert (here.lost(), here.is_over()) == ({2: "torchrun told it to end"}, True)


def test_a_process_of_this_node_is_gone_when_the_system_says_so(counts: Counts) -> None:
    here = Contact(post.DriversStore(counts), [hello(0, 0), hello(1, 0, pid=2**22 + 1)])
    assert (here.why_gone(1), here.gone(), here.is_over()) == ("torchrun's process of this rank is gone", (1,), True)
    assert counts.values == {}, "it is not asked for signs"


def test_a_worker_on_a_node_that_is_lost_has_ended(counts: Counts) -> None:
    store = c10d.TCPStore(launch.LOOPBACK, 0, is_master=True, wait_for_workers=False)
    here = contact(counts)
    link = FarLink(post.Office(store, 4), 2, START, lambda: here.why_gone(2))
    looks = 0
    while link.exit_code() is None:
        looks += 1
    assert SILENCE_SECONDS / 2 <= looks <= 2 * SILENCE_SECONDS
    link.end()
    assert link.last_words(Path("/nowhere")) == "nothing was heard of it for 60 s"


@pytest.fixture
def engine(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> torchrun.TorchrunEngine:
    """Of rank 0, whose rank 1 is on another node that is silent."""
    known = (hello(0, 0), hello(1, 1))
    monkeypatch.setattr(launch, "store_host", lambda: launch.LOOPBACK)
    monkeypatch.setattr(torchrun, "hosts", SimpleNamespace(declared=str, require=lambda *_: None))
    monkeypatch.setattr(torchrun, "_require_shared_folder", lambda *_: None)
    monkeypatch.setattr("fsdpcheck.engines._real.contact.time.sleep", lambda _: None)
    made = torchrun.TorchrunEngine(counts, known, Contact(post.DriversStore(counts), known, clock=Clock()))
    for _ in range(5):
        assert made._contact.lost() == {}
    return made


def test_without_a_node_no_pool_is_waited_for_and_the_session_is_interrupted(
    engine: torchrun.TorchrunEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found until then is kept: see session.torchrun.session."""

    def made(*_: object) -> None:
        raise FsdpcheckError("the worker of rank 1 ended with -9 before its first run")

    monkeypatch.setattr(torchrun, "Pool", made)
    with pytest.raises(KeyboardInterrupt):
        engine.run(REQUEST)


def test_what_fails_while_a_node_is_silent_is_no_failure_of_the_case(
    engine: torchrun.TorchrunEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it ended: no progress, or what gloo raises of a peer that is gone."""
    failed = Execution("torchrun", REQUEST, [RankResult(0), RankResult(1)], Failure("no progress", "it slept"))
    monkeypatch.setattr(engine, "_pool", lambda size: None)
    monkeypatch.setattr("fsdpcheck.engines._real.monitor.run", lambda *_: failed)
    with pytest.raises(KeyboardInterrupt):
        engine.run(REQUEST)
    assert engine._contact.lost() == {1: "nothing was heard of it for 60 s"}


def test_a_case_on_fewer_ranks_notices_too_that_a_node_is_lost(engine: torchrun.TorchrunEngine) -> None:
    alone = RunRequest(TrainingCase(ModelSpec((LayerSpec(2),)), MeshSpec(1)), "reference")
    assert engine._contact.is_over()
    with pytest.raises(KeyboardInterrupt):
        engine.run(alone)


def test_a_node_that_is_heard_again_leaves_the_failure_to_the_case(
    engine: torchrun.TorchrunEngine, counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = Execution("torchrun", REQUEST, [RankResult(0), RankResult(1)], Failure("raised", "ValueError"))
    monkeypatch.setattr(engine, "_pool", lambda size: None)
    monkeypatch.setattr("fsdpcheck.engines._real.monitor.run", lambda *_: failed)
    monkeypatch.setattr("fsdpcheck.engines._real.contact.time.sleep", lambda _: counts.add("signs of 1", 1))
    assert engine.run(REQUEST) is failed


def test_the_report_names_who_is_gone_and_with_whom_contact_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (hello(0, 0), hello(1, 0), hello(2, 1), hello(3, 1), hello(4, 2))
    why = "nothing was heard of it for 60 s"
    lost = {4: "torchrun told it to end", 2: why, 3: why}
    contact = SimpleNamespace(is_torchrun_gone=bool, gone=lambda: (1,), lost=lambda: lost)
    monkeypatch.setattr(session, "ranks", lambda: SimpleNamespace(known=known, contact=contact))
    gone, silent, told = session._why_over()
    assert gone == "torchrun ended the job: its process of rank 1 is gone"
    assert silent.startswith(f"lost contact with ranks 2, 3 on host1: {why}. What was found before stands")
    assert "see whether host1 runs and reaches host0" in silent
    assert told.startswith("lost contact with rank 4 on host2: torchrun told it to end")


def test_a_driver_whose_torchrun_is_gone_is_interrupted_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Counts):
        def add(self, key: str, by: int) -> int:
            raise RuntimeError("Broken pipe\nframe #0")

    store = post.DriversStore(Gone())
    here = Contact(store, [hello(0, 0), hello(1, 1)], clock=Clock())
    with pytest.raises(KeyboardInterrupt):
        here.lost()
    link = KeptLink(post.Office(post.DriversStore(Counts()), 2), 1, START, str)
    link._office = post.Office(store, 2)
    link.end()
    monkeypatch.setattr(session, "ranks", lambda: SimpleNamespace(known=(), contact=here))
    (note,) = session._why_over()
    assert note.startswith("torchrun is gone: its store")


def waited(look: Callable[[], object]) -> None:
    while not look():
        pass


def test_mail_of_a_keeper_is_carried_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    store = c10d.TCPStore(launch.LOOPBACK, 0, is_master=True, wait_for_workers=False)
    office, mail = post.Office(store, 2), Mail(store, 1, SILENCE_SECONDS)
    office.send(1, START)
    assert mail.source.poll(10), "whoever waits for it wakes"
    assert (mail.take(), mail.take()) == (START, None)
    mail.send(post.Reply(7, b"x" * (5 << 20)))
    mail.leave()
    waited(lambda: office.look(1, 7))
    mail.send(post.Ended(7, 0, ""))
    mail.close()
    waited(lambda: len(office.look(1, 7)) == 2)
    assert store.check(["rank 1 leaves"])
    assert store.add("signs of 1", 0) > 0
    assert mail.lost() == ""


def served(store: Any, driver: int | None, patience: float, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """What a keeper that is rank 1, without a worker, leaves with, and why."""
    monkeypatch.setenv("RANK", "1")
    here = keeper.Served()
    return keeper.serve(store, driver, here, patience), here.lost


def test_a_keeper_whose_store_is_silent_ends(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    counts.silent.set()
    assert served(counts, None, 0.05, monkeypatch) == (130, "torchrun's store was silent for 0 s")


def test_a_keeper_on_the_drivers_node_waits_for_a_store_that_is_stopped(
    counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when Ctrl-Z stops torchrun: it goes on later. SIGTERM ends it even then, here with a driver that is gone."""
    counts.silent.set()
    clock = Clock()
    mail = Mail(counts, 1, float("inf"), clock)
    assert [mail.lost() for _ in range(1000)] == [""] * 1000
    before = signal.getsignal(signal.SIGTERM)

    def end() -> None:
        waited(lambda: signal.getsignal(signal.SIGTERM) != before)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("fsdpcheck.engines._real.mail._LAST_SECONDS", 0.01)
    waiting = threading.Thread(target=end)
    waiting.start()
    assert served(counts, 2**22 + 1, 0.05, monkeypatch) == (143, "")
    waiting.join()


def test_a_keeper_whose_store_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Counts):
        def add(self, key: str, by: int) -> int:
            raise RuntimeError("Broken pipe\nframe #0")

    assert served(Gone(), None, SILENCE_SECONDS, monkeypatch) == (130, "torchrun's store is gone: Broken pipe")
    assert served(Gone(), os.getpid(), SILENCE_SECONDS, monkeypatch) == (130, "torchrun's store is gone: Broken pipe")
