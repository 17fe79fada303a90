"""``--shard`` and ``--blocks``: one session over several machines, and over several sets of cases."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from fsdpcheck.errors import UsageError, explain
from fsdpcheck.session import sharding


def add(run: argparse.ArgumentParser) -> None:
    """Add the options."""
    which = "judge this part of the session, the third of eight: 3/8; `fsdpcheck merge` joins them (default: all of it)"
    run.add_argument("--shard", type=_shard, default=(1, 1), metavar="N/M", help=which)
    many = "judge N times, with seeds from --seed on, a report each: FILE becomes FILE.seed0.json, ... (default: 1)"
    run.add_argument("--blocks", type=_blocks, default=1, metavar="N", help=many)


def each(options: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The options of each block. Raises UsageError for blocks that would have no report."""
    many = options.blocks
    if (many, options.shard) != (1, (1, 1)) and options.json is None:
        then = "name a file with --json: `fsdpcheck merge` reads it"
        raise UsageError(explain("a part of a session without a report says nothing of the whole", then=then))
    for number in range(many):
        seed, file = options.seed + number, options.json
        if many > 1:
            file = file.with_name(f"{file.stem}.seed{seed}{file.suffix}")
            print(f"block {number + 1} of {many}, seed {seed}: {file}", flush=True)
        yield argparse.Namespace(**{**vars(options), "seed": seed, "json": file, "block": (number + 1, many)})


def _shard(text: str) -> tuple[int, int]:
    try:
        return sharding.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _blocks(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= sharding.MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 1 to {sharding.MOST}")
    return int(text)
