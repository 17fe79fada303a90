"""One session: laws on adapters of a Plan, told as events. Draws and runs; prints nothing.

Events are dicts of JSON data, in this order: one "plan"; for each law and adapter a "law", a "case" before each case,
the "sources" that it was judged with, a "verdict" and, for a finding, a "confirmation"; one "end". Whoever listens sees
what was running when a process died.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from typing import Any, get_args

import hypothesis
import numpy
import torch

from fsdpcheck import engines
from fsdpcheck.adapters.contract import WITHOUT_MODEL, Features
from fsdpcheck.case import Case, Trait, user_model
from fsdpcheck.case.traits import OF_MODELS
from fsdpcheck.engines._common import metal
from fsdpcheck.engines.base import Engine
from fsdpcheck.errors import NoSuchLaw, UsageError, explain, spelling
from fsdpcheck.findings import faults, tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import model_process, registry
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Ran, Run
from fsdpcheck.loading import provenance
from fsdpcheck.session.confirmation import Confirming, opened
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.work_queue import Agenda, Pair

Emit = Callable[[dict[str, Any]], None]


def run_session(plan: Plan, emit: Emit, pairs: Iterable[Pair] | None = None, engine: Engine | None = None) -> None:
    """Check ``pairs`` of ``plan`` as they come, by default each law on each adapter, emitting every event.

    Raises UsageError for a plan that cannot begin, also for want of a GPU; everything later is a verdict. ``engine``
    overrules the plan's name; the caller closes it.
    """
    torch.set_num_threads(1)
    if plan.coverage:
        engines.cover(plan.coverage, "")
    loaded = provenance.Loaded((*plan.adapters, *plan.installs, *plan.own))
    registry.chapters(plan.laws_from)
    seen = model_process.inspected(*plan.own[:3], plan.units, plan.optimizer) if plan.model else None
    loaded.add(*model_process.loaded())
    laws = of_engine(chosen_laws(plan.laws), plan.engine if engine is None else engine.kind)
    laws = laws if seen is None else of_tier(laws, plan.real)
    plan = replace(plan, installs=tuple(faults.resolved(name) for name in plan.installs))
    with ExitStack() as stack:
        used = engine or opened(stack, plan.engine, plan.budget)
        if engine is None:
            metal.require(metal.of(plan.engine), max(plan.world_sizes, default=1))
        declared = _declared(plan.adapters, used, loaded)
        notes = (*(seen.notes if seen else ()), *_too_many_ranks(plan, declared))
        emit({**_plan_event(plan, laws, declared), "notes": notes, "sources": loaded.sources().to_data()})
        run = Run(used, plan.adapters[0], plan.installs, avoid=frozenset(plan.avoid))
        run = run.of(seen, plan.real) if seen else run
        check = Check(plan, run, emit, Confirming(stack, plan), loaded)
        if pairs is None:
            _all(laws, declared, check, emit)
        for name, ref in pairs or ():
            check(registry.chapters()[name], ref)


def _declared(refs: Iterable[str], engine: Engine, loaded: provenance.Loaded) -> dict[str, Features]:
    """What each adapter declares. Raises AdapterError, also for one that hides what its promises are judged by, and
    UsageError for laws that stand where nobody judges by them."""
    found = {}
    for ref in refs:
        declared = engine.declared(ref)
        loaded.add(declared.files, declared.packages)
        registry.require_shown(ref, declared.features)
        registry.require_known(ref, declared.laws)
        found[ref] = declared.features
    return found


def _too_many_ranks(plan: Plan, declared: Mapping[str, Features]) -> Iterator[str]:
    """A sentence for each adapter that takes fewer ranks than were requested: no law is judged on those."""
    for ref, has in declared.items():
        left = [size for size in dict.fromkeys(plan.world_sizes) if size > (has.max_world_size or size)]
        if left:
            numbers = ", ".join(map(str, left))
            yield f"no law is judged on {numbers} ranks: {ref} takes at most {has.max_world_size}"


def _all(laws: list[Law], declared: Mapping[str, Features], check: Check, emit: Emit) -> None:
    """Each law on each adapter, in the order of the agenda."""
    pairs = ((one.name, ref) for ref in declared for one in laws)
    agenda, pair = Agenda(pairs, _needing(laws, declared), _spaces(laws)), None
    while (pair := agenda.take(pair)) is not None:
        for vain in agenda.hear(check(registry.chapters()[pair[0]], pair[1])):
            emit({"event": "verdict", **vain.to_data()})


def _spaces(laws: list[Law]) -> dict[str, str]:
    """By law what names its space of cases."""
    return {one.name: one.space.drawn.key for one in laws}


def _unpromised(laws: list[Law], has: Features) -> dict[str, str]:
    """By law that an adapter does not promise, the reason."""
    return {one.name: reason for one in laws if (reason := one.not_promised(has))}


def _needing(laws: list[Law], declared: Mapping[str, Features]) -> dict[str, list[str]]:
    """Of each adapter the laws that it promises and that train a model."""
    promised = {ref: [one for one in laws if not one.not_promised(has)] for ref, has in declared.items()}
    return {ref: [one.name for one in found if one.promise not in WITHOUT_MODEL] for ref, found in promised.items()}


def replayed(
    token: tokens.Token, engine_name: str, budget: float | None = None, laws_from: tuple[str, ...] = ()
) -> Verdict:
    """Run the one case of ``token`` on an engine, and others on simulated ranks that tell the cause of what it finds.

    The token has passed ``replay.trusted``. Raises UsageError.
    """
    torch.set_num_threads(1)
    known = registry.chapters(laws_from)
    if token.law not in known:
        raise UsageError(f"the token is about the law {token.law!r}, which this release does not have")
    of_engine([known[token.law]], engine_name)
    for name in token.installs:
        faults.resolved(name)
    with ExitStack() as stack:
        used = opened(stack, engine_name, budget)
        used.declared(token.adapter)
        deadline = None if budget is None else time.monotonic() + budget
        own, real = user_model(token.case), "real" in token.case.requires()
        run = Run(used, token.adapter, token.installs, schedule=token.schedule)
        if own:
            seen = model_process.inspected(*own.references[:3], own.units, own.optimizer)
            run = replace(run.of(seen, real), own=own)
        return check_case(known[token.law], run, token.case, deadline=deadline)


def chosen_laws(globs: tuple[str, ...]) -> list[Law]:
    """The laws that any of ``globs`` matches, in the order of their chapters. Raises NoSuchLaw for an empty glob."""
    known = registry.chapters()
    for glob in globs:
        if not fnmatch.filter(known, glob):
            told = spelling.hint_of_glob(glob, known) or " Next: `fsdpcheck list laws` names all."
            raise NoSuchLaw(f"no law matches {glob!r}.{told}", glob)
    return [found for name, found in known.items() if any(fnmatch.fnmatchcase(name, glob) for glob in globs)]


def of_engine(laws: list[Law], kind: str) -> list[Law]:
    """Those that are for ranks of this kind: on simulated ones all but what compares real ones with them.

    Raises UsageError when none is left.
    """
    found = [one for one in laws if not metal.is_simulated(kind) or not one.on_real_ranks]
    if not found:
        names, then = ", ".join(one.name for one in laws), "--engine processes, or torchrun -m fsdpcheck run"
        raise UsageError(explain("of the chosen laws none is asked on simulated ranks", got=names, then=then))
    return found


def of_tier(laws: list[Law], real: bool) -> list[Law]:
    """The laws on real numbers, or all that can do without. Raises UsageError when none is left."""
    found = [one for one in laws if ("real" in one.needs_traits) == real or one.any_numbers]
    if not found:
        names, other = ", ".join(one.name for one in laws), "without --real" if real else "with --real"
        raise UsageError(f"of the chosen laws none is for this tier; got {names}, which run {other}")
    return found


def versions() -> dict[str, str]:
    """What a verdict is of, besides fsdpcheck itself."""
    torch_version = str(torch.__version__)  # a class of its own, which xdist does not send
    ours = {"python": platform.python_version(), "torch": torch_version, "hypothesis": hypothesis.__version__}
    return {**ours, "numpy": numpy.__version__}


def _plan_event(plan: Plan, laws: list[Law], declared: Mapping[str, Features]) -> dict[str, Any]:
    guarantees = {found.name: found.guarantee for found in laws}
    known = frozenset(get_args(Trait)) - (OF_MODELS if plan.model else frozenset())
    return {
        "event": "plan",
        "at": datetime.now().astimezone().isoformat(timespec="minutes"),
        "folder": os.getcwd(),
        "laws": [found.name for found in laws],
        "promised": sum(not found.not_promised(has) for found in laws for has in declared.values()),
        "installs": plan.installs,
        "unaccepted": {ref: sorted(known - has.accepts) for ref, has in declared.items()},
        "guarantees": guarantees,
        "needing": _needing(laws, declared),
        "spaces": _spaces(laws),
        "unpromised": {ref: _unpromised(laws, has) for ref, has in declared.items()},
        "versions": versions(),
    }


class Check:
    """Checks one law on one adapter and tells it: ``check(law, adapter's reference) -> Verdict``."""

    def __init__(self, plan: Plan, run: Run, emit: Emit, confirm: Confirming, loaded: provenance.Loaded) -> None:
        self._plan, self._run, self._emit, self._confirm = plan, run, emit, confirm
        self._loaded, self._told = loaded, ""
        self._deadline = None if plan.budget is None else time.monotonic() + plan.budget

    def __call__(self, found: Law, ref: str) -> Verdict:
        plan, pair = self._plan, {"law": found.name, "adapter": ref}
        run = replace(self._run, adapter_ref=ref, ran=Ran(), measured=bool(plan.coverage))
        self._emit({"event": "law", **pair})
        if plan.coverage:
            engines.cover(plan.coverage, found.name)
        seen: list[Case] = []
        verdict = check_law(
            found,
            run,
            plan.profile,
            plan.world_sizes,
            seed=plan.seed,
            deadline=self._deadline,
            on_case=_telling(self._emit, seen),
            roots=plan.roots,
        )
        if verdict.status == "holds" and run.ran.shared:
            verdict = self._confirm.held(found, run, verdict, seen)
        if plan.coverage:
            engines.cover(plan.coverage, "")
        self._loaded.add(run.ran.files, run.ran.packages)
        self._loaded.add(*model_process.loaded())
        self._tell_sources(pair)
        self._emit({"event": "verdict", **verdict.to_data()})
        for finding in verdict.findings:
            self._emit({"event": "confirmation", **pair, **self._confirm(found, finding)})
        return verdict

    def _tell_sources(self, pair: dict[str, str]) -> None:
        """With what the pair was judged: in full where it is not as told last, by its key otherwise."""
        sources = self._loaded.sources()
        whole = None if sources.key == self._told else sources.to_data()
        self._emit({"event": "sources", **pair, "key": sources.key, "sources": whole})
        self._told = sources.key


def _telling(emit: Emit, seen: list[Case]) -> Callable[[Law, Run, Case], None]:
    def tell(found: Law, run: Run, case: Case) -> None:
        seen.append(case)
        emit({"event": "case", "law": found.name, "adapter": run.adapter_ref, "case": case.to_json()})

    return tell
