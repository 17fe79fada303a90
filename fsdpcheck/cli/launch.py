"""A command that torchrun starts once a rank: rank 0 does it, the others serve, and all leave with one code."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Sequence
from typing import Final

from fsdpcheck.cli import own_parts
from fsdpcheck.cli.exits import guarded, serves
from fsdpcheck.errors import INTERNAL

WORDLESS: Final = "preflight"
"""The command where torchrun is given none."""
_ABOUT_ALL: Final = ("-h", "--help", "--version")


def main(words: Sequence[str], parsed: Callable[[list[str]], argparse.Namespace]) -> int:
    """The exit code of the command line ``words`` on this rank. What argparse leaves with, every rank leaves with."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when another rank has left first

    def command() -> int:
        options = parsed(asked(words))
        if serves():
            return _served(options)
        signal.signal(signal.SIGTERM, before)
        return int(options.command(options))

    return guarded(command) if serves() else _led(command)


def asked(words: Sequence[str]) -> list[str]:
    """The words of a command line of torchrun, with the command that stands for none in its place."""
    is_none = not words or (words[0].startswith("-") and words[0] not in _ABOUT_ALL)
    return [WORDLESS, *words] if is_none else list(words)


def _led(command: Callable[[], int]) -> int:
    """In rank 0: the exit code of ``command``, which the other ranks are told whatever became of it."""
    from fsdpcheck.session import torchrun

    code = INTERNAL
    try:
        code = guarded(command)
        return code
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else INTERNAL
        raise
    finally:
        torchrun.leave(code)


def _served(options: argparse.Namespace) -> int:
    """In another rank: keep workers for what rank 0 does with these options, and leave with its code."""
    from fsdpcheck.session import torchrun

    adapters = own_parts.adapters_of(options) if hasattr(options, "parallelize") else ()
    torchrun.serve(adapters, getattr(options, "rank_files", None))
