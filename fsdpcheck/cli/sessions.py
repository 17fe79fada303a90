"""A session of the command line: its options, and the way from them to what is told. Of run, gate and preflight."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from fsdpcheck import adapters
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.cli import forms, own_parts, values
from fsdpcheck.cli.exits import is_launched
from fsdpcheck.engines._common import metal
from fsdpcheck.errors import INTERNAL, FsdpcheckError, UsageError
from fsdpcheck.report import document
from fsdpcheck.report.progress import progress
from fsdpcheck.session import journal as journals
from fsdpcheck.session import resume
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan, parse_globs
from fsdpcheck.session.supervisor import Listen, supervise

MOST_JOBS = 8
"""Processes that ``--jobs auto`` starts at most: each takes about half a gigabyte."""


def add(run: argparse.ArgumentParser) -> None:
    """Add the options: what is checked, and how hard."""
    several = partial(run.add_argument, action="append", default=[])
    several(
        "--adapter",
        metavar="NAME",
        help=f"a built-in name, pkg.mod:attr or file.py:attr; repeatable (default: {_defaults()})",
    )
    values.one_of(run, "--engine", ("simulated", "processes"), "how ranks are had (default: simulated)", "simulated")
    add_metal(run)
    sizes = "numbers of ranks: 3, 1-5 or 2,13 (default: the profile's; quick: 1-5)"
    run.add_argument("--world-size", type=values.world_sizes, default=(), metavar="1-5", help=sizes)
    several("--law", metavar="GLOBS", help="only laws that match, such as 'norms.*,state.*'; repeatable (default: all)")
    values.one_of(run, "--profile", tuple(PROFILES), f"cases a law: {_profiles()} (default: quick)", "quick")
    run.add_argument(
        "--json", type=Path, metavar="FILE", help="write the whole session as JSON, after Ctrl-C too (default: none)"
    )
    forms.add(run)
    several("--install", metavar="NAME", help="plant a fault, by name or as pkg.mod:attr; repeatable (default: none)")
    run.add_argument(
        "--avoid",
        type=values.traits,
        default=(),
        metavar="TRAITS",
        help="draw no such case: tied,frozen (default: none)",
    )
    run.add_argument("--seed", type=int, default=0, metavar="N", help="draw other cases than everybody's (default: 0)")
    more = "most findings of a law, each of another root: 1 ends it at the first (default: 8)"
    run.add_argument("--roots", type=values.roots, default=8, metavar="N", help=more)
    run.add_argument("--no-confirm", action="store_true", help="do not run findings again on real gloo processes")
    run.add_argument(
        "--budget", type=values.seconds, metavar="SECONDS", help="draw no further case after so long (default: none)"
    )
    files = "under torchrun: a file of each rank, of what it did, in this folder (default: none)"
    run.add_argument("--rank-files", type=Path, metavar="DIR", help=files)
    jobs = f"processes that check at once: a number, or auto, the usable cores up to {MOST_JOBS} (default: auto)"
    run.add_argument("--jobs", "-j", type=values.jobs, default="auto", metavar="N", help=jobs)
    add_laws(run)
    own_parts.add_model(run)
    run.add_argument(
        "--units", type=values.names, metavar="NAMES", help="modules of it to shard: a,b (default: the blocks)"
    )
    run.add_argument("--real", action="store_true", help="your model as it is, own weights, by the rounding laws")
    own_parts.add(run)


def add_metal(parser: argparse.ArgumentParser) -> None:
    """On what ranks compute, and over what they speak."""
    device = "where tensors of ranks lie; simulated ranks share one GPU, on a stream each (default: cpu)"
    values.one_of(parser, "--device", get_args(metal.Device), device, "cpu")
    backend = "what real ranks speak over: gloo's may share GPUs (default: nccl with --device cuda, else gloo)"
    values.one_of(parser, "--backend", ("gloo", "nccl"), backend)


def kind_of(options: argparse.Namespace, engine: str) -> str:
    """The kind of ranks that is asked for; under torchrun those that it has started. Raises UsageError."""
    if not is_launched():
        return metal.kind_of(engine, options.device, options.backend)
    return metal.launched(metal.of(metal.kind_of("processes", options.device, options.backend)))


def add_laws(parser: argparse.ArgumentParser) -> None:
    """Laws of a user's own; a replay imports them only when they are given here."""
    what = "a file or module with laws of your own; repeatable (default: none)"
    parser.add_argument("--laws", action="append", default=[], metavar="FILE", help=what)


def told(
    options: argparse.Namespace,
    goes_on: bool = False,
    ending: forms.Ending | None = None,
    folder: str = "",
    held_to: Callable[[Ledger], None] | None = None,
) -> Ledger:
    """The session, when all of it is told, in the words of ``ending``. ``folder``: for what is measured.

    ``held_to``: what adds to the session, before it is told, what it lacks of something else.
    """
    own_parts.require_model(options)
    forms.require(options)
    plan = replace(plan_of(options), coverage=folder)
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
        try:
            if held_to is not None:
                _held(ledger, held_to)
        finally:
            forms.tell(options, [ledger], ending=ending)
    finally:  # each of the two is a copy of the findings; failing to give one does not lose the other
        if journal is not None:
            journal.close(document.document(ledger))
    return ledger


def _held(ledger: Ledger, held_to: Callable[[Ledger], None]) -> None:
    """What keeps a session from being held to something is in its files too, which would be green otherwise."""
    try:
        held_to(ledger)
    except KeyboardInterrupt:
        ledger.interrupted = True
        raise
    except Exception as error:
        ledger.errors.append((str(error), error.exit_code if isinstance(error, FsdpcheckError) else INTERNAL))
        raise


def plan_of(options: argparse.Namespace) -> Plan:
    """What is asked for."""
    asked = {adapters.canonical(ref): ref for ref in reversed(own_parts.adapters_of(options))}
    return Plan(
        adapters=tuple(reversed(asked.values())) or adapters.default_names(),
        laws=tuple(glob for globs in options.law for glob in parse_globs(globs)) or ("*",),
        engine=kind_of(options, options.engine),
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


def _defaults() -> str:
    return ", ".join(adapters.default_names())


def _profiles() -> str:
    return ", ".join(f"{name} {count}" for name, count in PROFILES.items())
