"""The command line: parse, call, print. Nothing here imports torch or hypothesis before a command needs it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdpcheck import __version__, adapters
from fsdpcheck.case import Trait
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.cli import blocks, completion, covered, doctor, forms, init, launched, listing, own_parts
from fsdpcheck.cli import claims as claims_command
from fsdpcheck.cli import compare as compare_command
from fsdpcheck.cli import gate as gate_command
from fsdpcheck.cli import merge as merge_command
from fsdpcheck.cli import power as power_command
from fsdpcheck.cli import preflight as preflight_command
from fsdpcheck.cli import report as report_command
from fsdpcheck.cli import simulate as simulate_command
from fsdpcheck.cli import trace as trace_command
from fsdpcheck.cli.exits import guarded, is_launched, say, serves
from fsdpcheck.errors import USAGE, UsageError, explain, spelling
from fsdpcheck.errors.excerpt import shown
from fsdpcheck.findings.verdict import exit_code
from fsdpcheck.report import colour, document, finding
from fsdpcheck.report.progress import progress
from fsdpcheck.session import journal as journals
from fsdpcheck.session import resume
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan, parse_globs, parse_traits, parse_world_sizes
from fsdpcheck.session.supervisor import Listen, replayed, supervise

_HINTS = {"processes": "processes", "torchrun": "processes"}  # engine of a token -> the one that replays it

MOST_JOBS = 8
"""Processes that ``--jobs auto`` starts at most: each takes about half a gigabyte."""

_WORDLESS = """fsdpcheck: a command is missing; next:
  fsdpcheck run --adapter reference --law 'training.*'              laws on an implementation, on simulated ranks
  torchrun --nproc-per-node 4 -m fsdpcheck run --adapter reference  the same on torchrun's ranks
  torchrun --nproc-per-node 4 -m fsdpcheck                          questions before a long job, on its ranks
  fsdpcheck --help                                                  all commands"""

_EPILOG = """exit codes:
  0 every promised law holds   1 a finding   2 usage or adapter error   3 internal error   4 no progress
  130 interrupted; findings so far are printed and kept"""

RUN_EPILOG = """examples:
  fsdpcheck run                                        the built-in implementations, quick profile
  fsdpcheck run --adapter reference --law 'norms.*'    one adapter, one chapter
  fsdpcheck run --adapter train.py:MyAdapter           your own (see README.md: an adapter is one file)
  fsdpcheck run --world-size 2,4 --profile ci --json report.json
  fsdpcheck run --adapter fully_shard --avoid tied     no case with a trait; `fsdpcheck list traits` names all
  fsdpcheck run --adapter opacus:sound                 a gate on Opacus, around its known defects
  fsdpcheck run --model train.py:build --batch train.py:batch      the laws on your own model
  fsdpcheck run --model train.py:build --batch train.py:batch --parallelize train.py:shard    and your own sharding
  torchrun --nproc-per-node 4 -m fsdpcheck run         real ranks, world size 4; torchrun itself exits with 1
                                                       whenever a rank's exit code is not 0
"""

_REPLAY_EPILOG = """examples:
  fsdpcheck replay 'v2:AAAA...'                        the case of a finding, on simulated ranks
  fsdpcheck replay 'v2:AAAA...' --engine processes     the same on real gloo processes
  fsdpcheck replay report.json                         every finding of a report, a journal or a log
A token only names things; what is not part of fsdpcheck is imported only if you repeat it: --adapter,
--install, --model, --batch, --loss, --optimizer.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if is_launched():
        return launched.main(words, lambda asked: _parsed(gate_command.expanded(asked, _add_session)))
    if not words:
        say(f"{_parser().format_usage().rstrip()}\n{_WORDLESS}")
        return USAGE

    def command() -> int:
        options = _parsed(gate_command.expanded(words, _add_session))
        return int(options.command(options))

    return guarded(command)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """The options; what argparse prints by itself comes from one rank."""
    out, err = (io.StringIO(), io.StringIO()) if serves() else (sys.stdout, sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        return _parser().parse_args(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdpcheck",
        description="Does a sharded, private training step compute exactly what one device would, and can it hang?",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fsdpcheck {__version__}")
    commands = parser.add_subparsers(
        required=True,
        metavar="{run,preflight,doctor,init,gate,merge,replay,report,simulate,compare,trace,power,claims,list,completion}",
    )
    _add_run(commands)
    preflight_command.add(commands, _add_session, _told)
    doctor.add(commands)
    init.add(commands)
    gate_command.add(commands, _add_session, _told)
    merge_command.add(commands)
    _add_replay(commands)
    report_command.add(commands)
    simulate_command.add(commands, _seconds)
    compare_command.add(commands, _seconds)
    trace_command.add(commands)
    power_command.add(commands, _world_sizes)
    claims_command.add(commands)
    listing.add(commands, _one_of)
    completion.add(commands, _parser)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="check laws on implementations",
        epilog=RUN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.set_defaults(command=_run)
    _add_session(run)
    blocks.add(run)
    run.add_argument(
        "--resume", action="store_true", help="check only what FILE, of an interrupted session, does not hold yet"
    )
    measured = "measure which lines and branches run, into a file of coverage.py, by law (default: none)"
    run.add_argument("--coverage", type=Path, metavar="FILE", help=measured)


def _add_session(run: argparse.ArgumentParser) -> None:
    """What is checked, and how hard."""
    several = partial(run.add_argument, action="append", default=[])
    several(
        "--adapter",
        metavar="NAME",
        help=f"a built-in name, pkg.mod:attr or file.py:attr; repeatable (default: {_defaults()})",
    )
    _one_of(run, "--engine", ("simulated", "processes"), "how ranks are had (default: simulated)", "simulated")
    sizes = "numbers of ranks: 3, 1-5 or 2,13 (default: the profile's; quick: 1-5)"
    run.add_argument("--world-size", type=_world_sizes, default=(), metavar="1-5", help=sizes)
    several("--law", metavar="GLOBS", help="only laws that match, such as 'norms.*,state.*'; repeatable (default: all)")
    _one_of(run, "--profile", tuple(PROFILES), f"cases a law: {_profiles()} (default: quick)", "quick")
    run.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole session as JSON, after Ctrl-C too (default: none)"
    )
    forms.add(run)
    several("--install", metavar="NAME", help="plant a fault, by name or as pkg.mod:attr; repeatable (default: none)")
    run.add_argument(
        "--avoid", type=_traits, default=(), metavar="TRAITS", help="draw no such case: tied,frozen (default: none)"
    )
    run.add_argument("--seed", type=int, default=0, metavar="N", help="draw other cases than everybody's (default: 0)")
    more = "most findings of a law, each of another root: 1 ends it at the first (default: 8)"
    run.add_argument("--roots", type=_roots, default=8, metavar="N", help=more)
    run.add_argument("--no-confirm", action="store_true", help="do not run findings again on real gloo processes")
    run.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="draw no further case after so long (default: none)"
    )
    files = "under torchrun: a file of each rank, of what it did, in this folder (default: none)"
    run.add_argument("--rank-files", type=Path, metavar="DIR", help=files)
    jobs = f"processes that check at once: a number, or auto, the usable cores up to {MOST_JOBS} (default: auto)"
    run.add_argument("--jobs", "-j", type=_jobs, default="auto", metavar="N", help=jobs)
    _add_laws(run)
    own_parts.add_model(run)
    run.add_argument("--units", type=_names, metavar="NAMES", help="modules of it to shard: a,b (default: the blocks)")
    run.add_argument("--real", action="store_true", help="your model as it is, own weights, by the rounding laws")
    own_parts.add(run)


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="run the case of a finding again",
        epilog=_REPLAY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.set_defaults(command=_replay)
    replay.add_argument("what", metavar="TOKEN|FILE", help="a token (v2:...) or a file that holds tokens")
    engine = "how ranks are had (default: as the token says)"
    _one_of(replay, "--engine", ("simulated", "processes"), engine)
    replay.add_argument("--adapter", metavar="NAME", help="run this implementation (default: the token's)")
    replay.add_argument(
        "--install", action="append", default=[], metavar="NAME", help="allow or add an install (default: none)"
    )
    replay.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="give up on a run after so long (default: never)"
    )
    script = "write a program of torch alone that shows it, for torchrun on gloo (default: none)"
    replay.add_argument("--script", type=Path, metavar="FILE", help=script)
    _add_laws(replay)
    own_parts.add_model(replay)


def _add_laws(parser: argparse.ArgumentParser) -> None:
    """Laws of a user's own; a replay imports them only when they are given here."""
    what = "a file or module with laws of your own; repeatable (default: none)"
    parser.add_argument("--laws", action="append", default=[], metavar="FILE", help=what)


def _run(options: argparse.Namespace) -> int:
    if options.resume and not options.json:
        raise UsageError("--resume goes on with the session of a file; next: name it with --json")
    if options.coverage is not None:
        with covered.measured(options) as folder:
            ledger = _told(options, folder=folder)
            print(covered.reached(folder, options.coverage, colour.painter(sys.stdout)), flush=True)
        return ledger.exit_code
    codes = []
    for block in blocks.each(options):
        ledger = _told(block, goes_on=block.resume)
        codes.append(ledger.exit_code)
        if ledger.interrupted:
            return ledger.exit_code
    return exit_code(codes)


def _told(
    options: argparse.Namespace, goes_on: bool = False, ending: forms.Ending | None = None, folder: str = ""
) -> Ledger:
    """The session, when all of it is told, in the words of ``ending``. ``folder``: for what is measured."""
    own_parts.require_model(options)
    forms.require(options)
    plan = replace(_plan(options), coverage=folder)
    known = resume.earlier(options.json, plan) if goes_on else None
    if options.rank_files and not is_launched():
        raise UsageError("--rank-files is about ranks of torchrun; next: leave it out, or start this with torchrun")
    journal = journals.Journal(options.json, plan, goes_on=known is not None) if options.json else None
    shown = progress(plan.adapters, options.verbose)

    def listen(ledger: Ledger, event: Mapping[str, Any]) -> None:
        if journal is not None:
            journal.note(event)
        shown(ledger, event)

    try:
        ledger = _session(plan, listen, options.jobs, known, options.rank_files)
    except BaseException:
        if journal is not None:
            journal.leave()
        raise
    finally:
        shown.close()
    try:
        forms.tell(options, [ledger], ending=ending)
    finally:  # each of the two is a copy of the findings; failing to give one does not lose the other
        if journal is not None:
            journal.close(document.document(ledger))
    return ledger


def _plan(options: argparse.Namespace) -> Plan:
    asked = {adapters.canonical(ref): ref for ref in reversed(own_parts.adapters_of(options))}
    return Plan(
        adapters=tuple(reversed(asked.values())) or adapters.default_names(),
        laws=tuple(glob for globs in options.law for glob in parse_globs(globs)) or ("*",),
        engine=options.engine,
        world_sizes=options.world_size,
        profile=options.profile,
        installs=tuple(options.install),
        seed=options.seed,
        budget=options.budget,
        confirm=not options.no_confirm,
        avoid=options.avoid,
        model=options.model,
        batch=options.batch,
        loss=options.loss,
        optimizer=options.optimizer,
        units=options.units,
        real=options.real,
        laws_from=tuple(options.laws),
        roots=options.roots,
        shard=getattr(options, "shard", (1, 1)),  # a gate has none: it would judge less than its baseline has
        block=getattr(options, "block", (1, 1)),
    )


def _session(plan: Plan, listen: Listen, jobs: int | None, known: resume.Earlier | None, files: Path | None) -> Ledger:
    if is_launched():  # torchrun owns the processes: this one is a rank
        from fsdpcheck.session import torchrun

        if jobs is not None and jobs > 1:
            raise UsageError(f"--jobs {jobs} under torchrun: its ranks are one job; next: leave --jobs out")
        if plan.shard != (1, 1):
            raise UsageError("--shard under torchrun: its ranks are one job; next: leave --shard out")
        if known is not None:
            raise UsageError("--resume under torchrun: it begins anew always; next: leave --resume out")
        return torchrun.session(plan, listen, files)
    if jobs is None:  # ranks that are processes use the cores already
        jobs = min(MOST_JOBS, _usable_cores()) if plan.engine == "simulated" else 1
    return supervise(plan, listen, jobs, known)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _replay(options: argparse.Namespace) -> int:
    from fsdpcheck.findings import tokens as replay
    from fsdpcheck.findings import verdict
    from fsdpcheck.session import faults

    texts = [options.what] if replay.looks_like_token(options.what) else replay.tokens_in(Path(options.what))
    tokens = [replay.decode(text) for text in texts]
    installs = [faults.resolved(name) for name in options.install]
    own = (options.model, options.batch, options.loss, options.optimizer)
    tokens = [replay.trusted(token, options.adapter, installs, own) for token in tokens]
    if options.script is not None and len(tokens) > 1:
        then = "name the token whose finding you want to send on"
        got = f"{len(tokens)} tokens in {options.what}"
        raise UsageError(explain("--script writes one program", got=got, wanted="one token", then=then))
    paint, codes = colour.painter(sys.stdout), []
    for token in tokens:
        engine = options.engine or _HINTS.get(token.engine, "simulated")
        found = shown(replayed(replay.encode(token), engine, options.budget, tuple(options.laws)))
        codes.append(found.exit_code)
        if found.finding is not None:
            broken = found.finding
            if broken.engine != "simulated":
                broken = replace(broken, confirmed="yes", note=f"run on {broken.engine}")
            print(finding.render([broken], len(codes), paint, token.installs))
            if options.script is not None:
                from fsdpcheck.report import reproducer  # imports torch

                written = reproducer.program(token, broken.guarantee, options.script)
                options.script.write_text(written, encoding="utf-8")
                print(f"script: torchrun --nproc-per-node {token.case.world_size} {options.script}")
        elif found.status == "holds":
            print(f"{paint('holds', 'green')}: {found.law} on {found.adapter}, for the case\n{token.case.describe()}")
        else:
            print(finding.trouble(found))
        for what in found.left:
            print(f"  {what}; it was put back (docs/threat-model.md)")
    return verdict.exit_code(codes)


def _one_of(
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


def _world_sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_world_sizes(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _traits(text: str) -> tuple[Trait, ...]:
    try:
        return parse_traits(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _jobs(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted auto or a number from 1 to 1024")
    return int(text)


def _roots(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number from 1 to 64")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r}: wanted a number of seconds above 0")
    return seconds


def _defaults() -> str:
    return ", ".join(adapters.default_names())


def _profiles() -> str:
    return ", ".join(f"{name} {count}" for name, count in PROFILES.items())
