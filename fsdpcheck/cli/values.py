"""What options take: words of a few, numbers of ranks, traits, seconds. What is none of them says what was wanted."""

from __future__ import annotations

import argparse

from fsdpcheck.case import Trait
from fsdpcheck.errors import UsageError, spelling
from fsdpcheck.session.plan import parse_traits, parse_world_sizes


def one_of(
    parser: argparse.ArgumentParser,
    name: str,
    known: tuple[str, ...],
    help: str,
    default: str | None = None,
    nargs: str | None = None,
) -> None:
    """An option or argument that takes one of a few words; a slip of the pen gets the nearest of them."""

    def read(text: str) -> str:
        if text not in known:
            hint = spelling.hint(text, known)
            raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(known)}).{hint}")
        return text

    words = f"{{{','.join(known)}}}" if name.startswith("-") else None
    parser.add_argument(name, type=read, default=default, nargs=nargs, metavar=words, help=help)


def world_sizes(text: str) -> tuple[int, ...]:
    """ "1-5", "2,4"."""
    try:
        return parse_world_sizes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def traits(text: str) -> tuple[Trait, ...]:
    """ "tied,frozen"."""
    try:
        return parse_traits(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def names(text: str) -> tuple[str, ...]:
    """ "a,b"."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def jobs(text: str) -> int | None:
    """A number of processes; None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted auto or a number from 1 to 1024")
    return int(text)


def count(text: str) -> int:
    """A number of things, one at least."""
    if not text.isdecimal() or not 0 < int(text) <= 1_000_000:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 1 to 1000000")
    return int(text)


def roots(text: str) -> int:
    """A number of findings."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 1 to 64")
    return int(text)


def seconds(text: str) -> float:
    """A number of seconds."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of seconds above 0")
    return found
