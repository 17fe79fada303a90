"""`fsdpcheck gate`: the session that a repository's pyproject.toml describes, held to its baseline."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Final

from fsdpcheck.cli import demands, sessions, settings
from fsdpcheck.cli.exits import is_launched
from fsdpcheck.errors import HOLDS, USAGE, UsageError, explain
from fsdpcheck.findings import tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report import colour
from fsdpcheck.session import baseline
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.supervisor import replayed
from fsdpcheck.session.waivers import Waiver, applied
from fsdpcheck.session.waivers import read as read_waivers

_BASELINE: Final = Path("fsdpcheck-baseline.json")
SETTINGS: Final = Path("pyproject.toml")
_NEXT: Final = "next: judge it again, or write what is judged now with --update and have that reviewed"
_EPILOG: Final = """settings:
  [tool.fsdpcheck]                    in pyproject.toml, keys as the options above without --
  adapter = ["train.py:MyAdapter"]    a list is a repeated option
  profile = "ci"
  avoid = ["tied"]
  require = ["training.*"]            laws that have to be promised and judged, whatever the baseline has
  [[tool.fsdpcheck.waiver]]           a known defect, with its witness: docs/gate.md
An option given here replaces that of FSDPCHECK_PROFILE and the like in the environment, and that one the file's.

examples:
  fsdpcheck gate --update    judge, and write what held as the baseline; commit it
  fsdpcheck gate             red where a law breaks, and where less is judged than the baseline has
exit codes: those of run; 2 where the session holds and the baseline asks for more"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    gate = commands.add_parser(
        "gate",
        help="run what pyproject.toml says, red where it judges less than the baseline",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gate.set_defaults(command=_gate)
    _add(gate)
    gate.add_argument("--update", action="store_true", help="write the baseline of this session, if all of it holds")
    sessions.add(gate)


def expanded(words: list[str]) -> list[str]:
    """The words of the command line, those of a gate with its settings in front. Raises UsageError for a wrong one."""
    if not words or words[0] != "gate" or {"-h", "--help"} & {*words}:
        return words
    known = argparse.ArgumentParser(prog="fsdpcheck gate", add_help=False)
    _add(known)
    sessions.add(known)
    return ["gate", *settings.words(known, words[1:], SETTINGS), *words[1:]]


def _add(gate: argparse.ArgumentParser) -> None:
    """What may be a setting too; --update may not: a gate that always writes its baseline is always green."""
    what = f"what must be judged at least (default: {_BASELINE})"
    gate.add_argument("--baseline", type=Path, default=_BASELINE, metavar="FILE", help=what)
    demands.add_require(gate)


def _gate(options: argparse.Namespace) -> int:
    if not options.adapter and not options.parallelize and not options.model:
        what = "nothing says what this gate judges"
        got = "no adapter on the command line" + ("" if SETTINGS.exists() else f", and no {SETTINGS} here")
        then = f"name it under [tool.fsdpcheck] in {SETTINGS}: adapter = ['...']; `fsdpcheck init` writes all of it"
        raise UsageError(explain(what, got=got, then=then))
    wanted = None if options.update else baseline.read(options.baseline)
    place_of_required = partial(settings.place, SETTINGS, "require", options.require)
    demands.require_known(options, place_of_required)
    waivers, unmet = read_waivers(SETTINGS), list[str]()

    def hold(ledger: Ledger) -> None:
        """Have the session say which findings are waived, and what makes it red beside its own verdicts."""
        if ledger.interrupted:
            return
        if ledger.unmatched:  # nothing was judged, so nothing more is to be said
            where = settings.place(SETTINGS, "law", options.law, ledger.unmatched)
            ledger.errors = [(explain(text, where=where), code) for text, code in ledger.errors]
            return
        sentences = wanted.missing(ledger) if wanted is not None else []
        sentences += [_on_torchrun(options.baseline) or _NEXT] if sentences else []
        sentences += demands.required(options, ledger, place_of_required)
        try:
            waived = applied(waivers, ledger.findings, partial(_replayed, options), date.today())
            ledger.waived = {finding.token: str(waiver) for finding, waiver in waived.findings}
            unmet.extend(map(str, waived.unmet))
            sentences = [*waived.wrong, *sentences]
        finally:
            code = ledger.exit_code or USAGE  # a finding is worse than what is missing
            ledger.errors += [(f"gate: {sentence}", code) for sentence in sentences]

    ledger, paint = sessions.told(options, held_to=hold), colour.painter(sys.stdout)
    for waiver in unmet:
        print(paint(f"gate: waived, its witness breaks still, and met by no case of this session: {waiver}", "yellow"))
    if ledger.interrupted or (wanted is not None and ledger.exit_code != HOLDS):
        return ledger.exit_code
    if wanted is None:
        return _update(options.baseline, ledger)
    waived = sum(baseline.is_waived(ledger, ledger.verdicts[pair]) for pair in wanted.checks if pair in ledger.verdicts)
    every = f"{len(wanted.checks) - waived} of {len(wanted.checks)}" if waived else f"all {len(wanted.checks)}"
    held = f"gate: {every} checks of {options.baseline} hold{', the others are waived' * bool(waived)}"
    print(paint(held, "green"))
    if beyond := wanted.lacks(ledger):
        print(paint(f"gate: {beyond}; next: fsdpcheck gate --update, and commit it", "yellow"))
    return HOLDS


def _on_torchrun(file: Path) -> str:
    """What to do on ranks of torchrun, whose number is that of no ordinary session; "" elsewhere."""
    if not is_launched():
        return ""
    many = os.environ["WORLD_SIZE"]
    return (
        f"next: {file} may be of other numbers of ranks than those of torchrun, here {many} and fewer: give these a"
        f" baseline of their own, --baseline {file.with_suffix('')}.torchrun{many}.json, first with --update"
    )


def _replayed(options: argparse.Namespace, waiver: Waiver) -> Verdict:
    """The verdict on the witness of a waiver, on simulated ranks."""
    own = (options.model, options.batch, options.loss, options.optimizer)
    token = tokens.trusted(tokens.decode(waiver.token), waiver.adapter, (), own)
    return replayed(tokens.encode(token), "simulated", options.budget, tuple(options.laws))


def _update(path: Path, ledger: Ledger) -> int:
    if ledger.exit_code != HOLDS:
        print(f"{path} is as it was: not all of this session holds", file=sys.stderr)
        return ledger.exit_code
    found = baseline.of(ledger)
    if path.exists():
        with suppress(UsageError):  # what is no baseline has nothing to lose
            for sentence in baseline.read(path).missing(ledger):
                print(f"{path} asks for less than before: {sentence}", file=sys.stderr)
    try:
        path.write_text(found.to_json(), encoding="utf-8")
    except OSError as error:
        then = "name a file that can be written with --baseline"
        raise UsageError(explain(f"the baseline {path} cannot be written", got=error, then=then)) from error
    print(f"{path}: {len(found.checks)} checks; commit it")
    return HOLDS
