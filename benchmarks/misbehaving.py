"""Implementations that misbehave, named ``misbehaving.py:WHAT_on_WHO``: WHO is one (rank 1), first (rank 0) or all.

Each trains data-parallel in the plainest way and does its one thing in the middle of its first step, before gradients
are reduced. What is named ``WHAT_at_load`` happens when the adapter is loaded. ``HARMLESS`` names what real ranks get
away with, so that 0 is a right exit code.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from os import _exit as bound_exit
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck.adapter import Batch, Features, Setup

Action = Callable[[], object]
_LOCK = threading.Lock()
_HELD = [threading.Lock()]


def _for_ever() -> NoReturn:
    while True:
        time.sleep(1e6)


def _spin() -> NoReturn:
    while True:
        pass


class _Leaving:
    def __del__(self) -> None:
        os._exit(0)


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _raises(error: BaseException) -> Action:
    def act() -> None:
        raise error

    return act


def _forks(left: Action, session: bool = False) -> Action:
    def act() -> None:
        if os.fork() == 0:
            if session and os.fork() == 0:
                os.setsid()
            left()
            os._exit(0)

    return act


def _starts(target: Action, daemon: bool = False, join: bool = False) -> Action:
    def act() -> None:
        thread = threading.Thread(target=target, daemon=daemon)
        thread.start()
        if join:
            thread.join()

    return act


def _swallows() -> NoReturn:
    while True:
        try:
            dist.all_reduce(torch.ones(2))
        except BaseException:
            continue


def _holds(lock: threading.Lock) -> Action:
    def act() -> None:
        with lock:
            dist.barrier()

    return act


def _recurses() -> None:
    _recurses()


def _ignores_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        ctypes.CDLL(None).signal(number, 1)


ACTIONS: Final[dict[str, Action]] = {
    "raises": _raises(RuntimeError("a bad shard")),
    "raises_base_exception": _raises(BaseException("a bad shard")),
    "raises_keyboard_interrupt": _raises(KeyboardInterrupt()),
    "raises_generator_exit": _raises(GeneratorExit()),
    "raises_unspeakably": _raises(_Unspeakable()),
    "raises_at_length": _raises(RuntimeError("\x1b[31mX\n" * 200_000)),
    "recurses": _recurses,
    "exits": lambda: sys.exit(0),
    "leaves": lambda: os._exit(0),
    "leaves_by_a_bound_name": lambda: bound_exit(0),
    "leaves_in_del": lambda: [_Leaving()].clear(),
    "leaves_later": _starts(lambda: (time.sleep(0.5), bound_exit(0)), join=True),
    "aborts": lambda: ctypes.CDLL(None).abort(),
    "kills_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminates_itself": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "stops_itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "crashes": lambda: ctypes.string_at(0),
    "spins": _spin,
    "spins_in_c": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),
    "keeps_the_interpreter": lambda: ctypes.PyDLL(None).pause(),
    "sleeps": _for_ever,
    "waits_for_an_event": lambda: threading.Event().wait(),
    "waits_for_its_thread": _starts(threading.Event().wait, join=True),
    "waits_for_its_process": lambda: subprocess.run(["sleep", "1000000"], check=False),
    "asks": input,
    "swallows_everything": _swallows,
    "calls_alone": dist.barrier,
    "calls_another": lambda: dist.all_reduce(torch.ones(2)),
    "destroys_its_group": dist.destroy_process_group,
    "holds_a_lock_of_its_module": _holds(_LOCK),
    "holds_a_lock_in_an_object": _holds(_HELD[0]),
    "leaves_a_thread": _starts(_for_ever),
    "leaves_a_spinning_daemon": _starts(lambda: [None for _ in iter(lambda: time.sleep(0.001), 0)], daemon=True),
    "forks": _forks(_for_ever),
    "forks_into_a_session": _forks(_for_ever, session=True),
    "starts_a_process": lambda: subprocess.Popen(["sleep", "1000000"]),
    "starts_python_beside": lambda: multiprocessing.get_context("fork").Process(target=_for_ever).start(),
    "never_exits": lambda: atexit.register(_for_ever),
    "shares_memory": lambda: torch.ones(1000).share_memory_(),
    "closes_its_streams": lambda: (os.close(1), os.close(2)),
    "closes_everything": lambda: os.closerange(3, 256),
    "prints_at_length": lambda: print("x" * 5_000_000),
    "ignores_signals": _ignores_signals,
    "traces": lambda: sys.settrace(_raises(RuntimeError("traced"))),  # type: ignore[arg-type]
}
AT_LOAD: Final[dict[str, Action]] = {
    "raises": _raises(RuntimeError("no import")),
    "leaves": lambda: bound_exit(0),
    "kills_itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": _for_ever,
    "spins": _spin,
    "forks": _forks(_for_ever),
    "leaves_a_thread": _starts(_for_ever),
}
HARMLESS: Final = frozenset(
    {
        *("leaves_a_thread", "leaves_a_spinning_daemon", "forks", "forks_into_a_session", "starts_a_process"),
        *("starts_python_beside", "never_exits", "shares_memory", "closes_its_streams", "closes_everything"),
        *("prints_at_length", "ignores_signals", "traces", "holds_a_lock_of_its_module", "holds_a_lock_in_an_object"),
        *("stops_itself", "leaves_a_thread_at_load", "forks_at_load"),
        *("calls_alone_on_all", "calls_another_on_all"),
    }
)
"""``holds_...`` on all ranks alone. Who stops is set going again where somebody looks after it. What all ranks call
alike, if to no end, is right."""


class _Trainer:
    def __init__(self, model: nn.Module, setup: Setup, act: Action | None) -> None:
        self.model, self.setup, self._act = model, setup, act
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            torch.autograd.backward(losses.sum() * batch.loss_scale)
        if self._act is not None:
            self._act()
        self._act = None
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(self.setup.world_size)
        self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


class Misbehaving:
    """Ranks of which some do ``act`` in the first step of each training."""

    def __init__(self, name: str, act: Action, who: str) -> None:
        self.name, self._act, self._who = name, act, who
        self.features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias"}))

    def build(self, model: nn.Module, setup: Setup) -> _Trainer:
        does = {"one": setup.rank == 1, "first": setup.rank == 0, "all": True}[self._who]
        return _Trainer(model, setup, self._act if does else None)


def __getattr__(name: str) -> Misbehaving:
    what, _, who = name.rpartition("_on_")
    if what in ACTIONS and who in ("one", "first", "all"):
        return Misbehaving(name, ACTIONS[what], who)
    if name.removesuffix("_at_load") in AT_LOAD and name.endswith("_at_load"):
        AT_LOAD[name.removesuffix("_at_load")]()
        return Misbehaving(name, lambda: None, "all")
    raise AttributeError(name)
