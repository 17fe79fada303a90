"""Implementations that try to keep a session from ending, to choose its exit code, or to lose its findings."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import torch.distributed as dist
from attack_base import Plain, plain
from torch import Tensor, nn

from fsdpcheck.adapter import Batch, Setup


class Unreduced(Plain):
    """Wrong on purpose: no gradient is reduced."""

    def average(self, name: str, grad: Tensor) -> None:
        pass


class LeavesWithZero(Unreduced):
    """Wrong, and at exit ends the process with code 0."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        atexit.register(os._exit, 0)


class ExitsInAStep(Plain):
    """The second step ends the process with code 0, at once."""

    def reduce(self) -> None:
        super().reduce()
        if self.steps == 2:
            os._exit(0)


class CannotBeStopped(Plain):
    """Rank 0 calls one collective too many, and tries it again whatever is raised."""

    def reduce(self) -> None:
        super().reduce()
        while self.rank == 0:
            try:
                dist.barrier()
                break
            except BaseException:
                continue


class Spins(Plain):
    """Every rank ignores all signals that can be ignored, and then spins for ever in the second step."""

    def reduce(self) -> None:
        super().reduce()
        if self.steps == 2:
            while True:
                pass


class LeavesAChild(Plain):
    """Right, but starts a child that lives on and has the session's stdout and stderr."""

    child: subprocess.Popen[bytes] | None = None

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        if LeavesAChild.child is None:
            LeavesAChild.child = subprocess.Popen(["sleep", "45"])


class Asks(Plain):
    """Reads a line of stdin before each reduction, which nobody ever types."""

    def reduce(self) -> None:
        sys.stdin.readline()
        super().reduce()


class TooDeep(Plain):
    """Recurses through C frames with the recursion limit lifted, until the stack of the process is used up."""

    def reduce(self) -> None:
        sys.setrecursionlimit(10**8)

        def deeper(number: int) -> int:
            return max(map(deeper, [number + 1]))

        deeper(0)


class Clings:
    """Its finaliser sleeps for an hour."""

    def __del__(self) -> None:
        time.sleep(3600)


KEPT: list[Any] = []


class NeverJoined(Plain):
    """Right, but leaves a thread that is no daemon and never ends, and an object whose finaliser sleeps an hour."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        super().__init__(model, setup)
        if not KEPT:
            KEPT.append(Clings())
            threading.Thread(target=time.sleep, args=(3600,)).start()


class ClosesTheOutput(Unreduced):
    """Wrong; says that all promised laws hold, and then points stdout and stderr to nowhere."""

    def reduce(self) -> None:
        print("\033[2J\nall promised laws hold" + "\n" * 5000, flush=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        super().reduce()


def spins(model: nn.Module, setup: Setup) -> Spins:
    """Make a Spins, and ignore signals where that is allowed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGHUP, signal.SIGUSR1):
        try:
            signal.signal(number, signal.SIG_IGN)
        except ValueError:
            signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    return Spins(model, setup)


class Sneaks(Unreduced):
    """Wrong; replaces the exit function of the interpreter and the hook for uncaught exceptions."""

    def step(self, batch: Batch) -> None:
        sys.exit = lambda code=0: os._exit(0)
        sys.excepthook = lambda *details: os._exit(0)
        super().step(batch)


leaves_with_zero = plain("leaves_with_zero", LeavesWithZero)
exits_in_a_step = plain("exits_in_a_step", ExitsInAStep)
cannot_be_stopped = plain("cannot_be_stopped", CannotBeStopped)
spins_for_ever = plain("spins_for_ever", spins)
leaves_a_child = plain("leaves_a_child", LeavesAChild)
asks = plain("asks", Asks)
too_deep = plain("too_deep", TooDeep)
never_joined = plain("never_joined", NeverJoined)
closes_the_output = plain("closes_the_output", ClosesTheOutput)
sneaks = plain("sneaks", Sneaks)
unreduced = plain("unreduced", Unreduced)
