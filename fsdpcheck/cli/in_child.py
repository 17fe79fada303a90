"""Ranks of a command in a process of their own: what ends it ends no report."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fsdpcheck.cli.exits import guarded
from fsdpcheck.compat import multiprocessing_private
from fsdpcheck.errors import FINDING, INTERNAL
from fsdpcheck.report import colour


def in_child(work: Callable[[], int], file: Path | None) -> int:
    """``work`` in a forked process, where there is such a thing: what ends the ranks' process ends no report."""
    if not hasattr(os, "fork"):
        return work()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _end(work)
    kept = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child has it too, and says what became of it
    try:
        _, status = os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGINT, kept)
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    from fsdpcheck.report import simulation as report

    name = signal.Signals(os.WTERMSIG(status)).name
    print(report.lost(name, colour.painter(sys.stdout)), flush=True)
    if file is not None:
        write(file, report.lost_document(name))
    return FINDING


def _end(work: Callable[[], int]) -> NoReturn:
    """Do the work and end this process, whatever threads are left in it, and whatever goes wrong."""
    code = INTERNAL
    gc.freeze()  # what the parent has left for the collector has threads there and not here: its end may be a crash
    try:
        multiprocessing_private.forget_what_the_parent_has()
        code = guarded(work)
        multiprocessing_private.end_servers()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        code = INTERNAL
    finally:
        os._exit(code)


def write(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
