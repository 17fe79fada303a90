"""A command line of torchrun, as one pastes it: what it would start, and on how many ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.programs.script import Script

_WANTED = "torchrun ..., or python -m torch.distributed.run ..."


@dataclass(frozen=True)
class Launch:
    """A script and the ranks that it runs on. ``per_node``: ranks of one node; 0 for all."""

    script: Script
    ranks: int
    per_node: int = 0


def read(line: str, ranks: int | None = None, per_node: int = 0) -> Launch:
    """What ``line`` starts. ``ranks`` and ``per_node`` are used in place of what it says, where they are given.

    Variables that stand before the command are set in this process. Raises UsageError for a line that is none.
    """
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(explain("the line of --torchrun cannot be read", got=f"{line!r}: {error}")) from None
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    options = _parsed(_arguments_of(words, line), line)
    nodes = _number(str(options.nnodes).partition(":")[2] or str(options.nnodes), "--nnodes", line)
    if ranks is None:
        each = _number(str(options.nproc_per_node), "--nproc-per-node", line)
        ranks, per_node = nodes * each, per_node or (each if nodes > 1 else 0)
    if options.no_python:
        raise UsageError(explain("simulated ranks run Python", got="--no-python", wanted="a script or -m module"))
    find = script.of_module if options.module else _of_file
    return Launch(find(options.training_script, options.training_script_args), ranks, per_node)


def _arguments_of(words: list[str], line: str) -> list[str]:
    """The words after the launcher's name."""
    head = [os.path.basename(word) for word in words[:3]]
    if head[:1] == ["torchrun"]:
        return words[1:]
    if head[1:2] == ["-m"] and head[2:] in (["torch.distributed.run"], ["torch.distributed.launch"]):
        return words[3:]
    raise UsageError(explain("--torchrun takes a command line of torchrun", got=repr(line), wanted=_WANTED))


def _parsed(words: list[str], line: str) -> Any:
    """torchrun's own reading of its options. Tried: torch 2.13.0."""
    from torch.distributed.run import get_args_parser

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return get_args_parser().parse_args(words)
    except SystemExit:
        why = said.getvalue().strip().splitlines()
        raise UsageError(
            explain("torchrun would not read this line", got=repr(line), where=why[-1] if why else "")
        ) from None


def _number(text: str, option: str, line: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UsageError(
        explain(f"{option} {text} says no number", got=repr(line), wanted="a number of ranks", then="add -n 4")
    )


def _of_file(name: str, arguments: list[str]) -> Script:
    return script.of_file(Path(name), arguments)
