"""A machine without a GPU, as ranks find it: who asks for one is told what to do about it."""

from __future__ import annotations

import dis
import linecache
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from fsdpcheck.compat import frames_private, torch_private
from fsdpcheck.errors import NotSupported, explain
from fsdpcheck.simulation.programs.cuda_devices import is_program
from fsdpcheck.simulation.scheduler import where

_THEN: Final = "play it on the CPU: --cuda-as-cpu, or simulate(..., cuda_as_cpu=True)"
_OF_GPUS: Final = re.compile(r"cuda|gpu|accelerator device|nvtx|nccl|dummy base class", re.IGNORECASE)
"""What torch says, or a program itself, where a GPU is wanted and there is none. Tried: 2.13.0."""
_QUESTIONS: Final = ("is_available", "device_count")
_KINDS: Final = (RuntimeError, AssertionError, AttributeError, TypeError, ValueError, NotImplementedError)


class NoGpu:
    """``asked``: the first line at which a program has asked whether there is a GPU; "" for none."""

    def __init__(self) -> None:
        self.asked = ""
        self.counts: Counter[str] = Counter()
        self._there = torch.cuda.is_available()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, questions are noted."""
        asked = [
            torch_private.replaced(owner, **{name: self._noting(getattr(owner, name)) for name in _QUESTIONS})
            for owner in (torch.cuda, torch.accelerator)
        ]
        with asked[0], asked[1]:
            yield

    def on_thread(self) -> AbstractContextManager[None]:
        """Nothing is played."""
        return nullcontext()

    def run(self, program: Callable[[], Any]) -> Any:
        """What ``program`` returns. Raises NotSupported, with its line, where it wants a GPU and there is none."""
        try:
            return program()
        except _KINDS as error:
            if self._there or isinstance(error, NotSupported) or not self._is_about_gpus(error):
                raise
            at, line = _place(error)
            said = f"{line}: {str(error).strip().splitlines()[0]}"
            text = explain("the program wants a GPU, and there is none", got=said, where=at, then=_THEN)
            raise NotSupported(text) from error

    def _is_about_gpus(self, error: BaseException) -> bool:
        """Whether torch says that there is no GPU, or the program, which has asked before whether there is one."""
        if not _OF_GPUS.search(str(error)):
            return False
        return bool(self.asked) or not _raised_by_a_program(error)

    def _noting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def ours(*args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            if not (self._there or self.asked) and is_program(frame):
                self.asked = where(frame)
            return real(*args, **options)

        return ours


def _raised_by_a_program(error: BaseException) -> bool:
    """Whether a line of the program raises by itself, and no function of torch that it calls."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    if innermost is None:
        return False
    code = innermost.tb_frame.f_code
    raises = code.co_code[innermost.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return raises and not frames_private.is_torch(code.co_filename)


def _place(error: BaseException) -> tuple[str, str]:
    """(file:line, the line) of the innermost frame of the program."""
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if not frames_private.is_plumbing(frame.f_code.co_filename)
    ]
    at = where(frames[-1]) if frames else ""
    file, _, number = at.rpartition(":")
    return at, linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
