"""``--require`` and ``--baseline``: what a session has to have judged, whatever command put it together."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

from fsdpcheck.errors import USAGE, UsageError
from fsdpcheck.session import baseline, requirements
from fsdpcheck.session.baseline import Baseline
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import parse_globs

_REQUIRED: Final = "next: promise it, or take it out of what is required"
_LESS: Final = "next: judge it again, or have a smaller baseline reviewed (fsdpcheck gate --update)"


def add(parser: argparse.ArgumentParser) -> None:
    """Add both options, of a command that is held to nothing by itself."""
    add_require(parser)
    what = "red where less is judged than this baseline of `fsdpcheck gate` has (default: none)"
    parser.add_argument("--baseline", type=Path, metavar="FILE", help=what)


def add_require(parser: argparse.ArgumentParser) -> None:
    """Add the one that needs no file."""
    what = "red unless each law that matches is promised and judged; repeatable (default: none)"
    parser.add_argument("--require", action="append", default=[], metavar="GLOBS", help=what)


def read(options: argparse.Namespace) -> Baseline | None:
    """The baseline that is named, None for none. Raises UsageError for a file that is none."""
    return baseline.read(options.baseline) if options.baseline is not None else None


def require_known(options: argparse.Namespace, where: Callable[[str], str] = lambda glob: "") -> None:
    """Raise UsageError for a glob of ``--require`` that no law matches, before anything is judged.

    ``where`` a glob is written, "" for the command line. Laws of a user's own file are known to the session alone,
    so where there is one, ``hold`` says it at the end.
    """
    if not options.require or options.laws:
        return
    from fsdpcheck.judging import registry  # imports torch

    known = registry.chapters()
    for glob in (glob for text in options.require for glob in parse_globs(text)):
        if sentence := requirements.unknown(glob, known, where(glob)):
            raise UsageError(sentence)


def hold(options: argparse.Namespace, wanted: Baseline | None, ledger: Ledger) -> None:
    """Make ``ledger`` red, a sentence for each thing that it lacks; one that was interrupted lacks what it had not."""
    if ledger.interrupted:
        return
    less = wanted.missing(ledger) if wanted is not None else []
    sentences = [*less, *([_LESS] if less else []), *required(options, ledger)]
    code = ledger.exit_code or USAGE  # a finding is worse than what is missing
    ledger.errors += [(sentence, code) for sentence in sentences]


def required(options: argparse.Namespace, ledger: Ledger, where: Callable[[str], str] = lambda glob: "") -> list[str]:
    """What ``ledger`` lacks of what is required, a sentence each, and what to do behind them.

    ``where`` a glob is written, "" for the command line.
    Of all laws that there are, and not of those that were chosen alone: to choose fewer is no way around it.
    """
    globs = [glob for text in options.require for glob in parse_globs(text)]
    if not globs:
        return []
    from fsdpcheck.judging import registry  # imports torch

    told = requirements.lacking(ledger, globs, dict.fromkeys((*registry.chapters(), *ledger.laws)), where)
    return [*told, _REQUIRED] if told else []
