"""An examination: engines, adapters and one small case of each promised law, told as events. Imports torch.

It says what works on this machine, and is no verdict: a law that holds on one case is not said to hold.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from fsdpcheck import engines
from fsdpcheck.engines._common import metal
from fsdpcheck.engines.base import TORCHRUN, Engine
from fsdpcheck.errors import INTERNAL, FsdpcheckError
from fsdpcheck.errors.excerpt import WHOLE, excerpt
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import registry
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.exploration import cases_of, seed_of
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import enumeration

Emit = Callable[[dict[str, Any]], None]
SIZES: Final = (2, 3, 4, 6, 8)
"""Numbers of ranks, of which the first is taken on which a law says something."""
_TRIES: Final = 5
"""Cases that are tried where the first ones are not exact, which says nothing of the machine."""
_FIRST: Final = "training.plain"
_REFERENCE: Final = "ddp"
"""The adapter that engines are tried with: torch's own, with nothing of fsdpcheck or of a user in it."""


def examine(refs: Sequence[str], emit: Emit) -> None:
    """Tell of each engine, of each adapter of ``refs``, and of each law that it promises, one event each.

    An event has ``problem``: what does not work, "" where all does; and ``code``, the exit code that it asks for.
    """
    default = torch.get_num_threads()
    emit({"event": "threads", "threads": default})
    torch.set_num_threads(1)
    laws = registry.chapters()
    engine = engines.open_engine("simulated")
    try:
        adapters = {ref: _adapter(ref, engine) for ref in refs}  # before anything else has them imported
        for name in engines.names():
            emit(_engine(name, laws[_FIRST]))
        for ref in refs:
            emit(adapters[ref])
            for law in laws.values() if not adapters[ref]["problem"] else ():
                if not law.not_promised(engine.declared(ref).features):
                    emit(_law(law, Run(engine, ref)))
    finally:
        engine.close()


def _engine(name: str, law: Law) -> dict[str, Any]:
    """A step on two ranks, whose gradients are reduced, is what it is on one."""
    lacks = "under torchrun alone" if name == TORCHRUN else metal.of(name).lacks(2)
    if lacks:
        return {"event": "engine", "name": name, "problem": "", "code": 0, "told": f"({lacks}; not tried)"}
    with _timed("engine", name=name, told=f"a step of {_REFERENCE}, with its all_reduce, on 2 ranks") as told:
        engine = engines.open_engine(name)
        try:
            verdict = _judged(law, Run(engine, _REFERENCE), 2)
        finally:
            engine.close()
        told |= _outcome(verdict)
    return told


def _adapter(ref: str, engine: Engine) -> dict[str, Any]:
    """How long it takes to import, and what it promises."""
    with _timed("adapter", name=ref, told="") as told:
        declared = engine.declared(ref)
        registry.require_shown(ref, declared.features)
        registry.require_known(ref, declared.laws)
        told["told"] = f"promises {', '.join(sorted(declared.features.promises)) or 'nothing'}"
    return told


def _law(law: Law, run: Run) -> dict[str, Any]:
    """One small case on as few ranks as say anything."""
    most = run.features.max_world_size or max(SIZES)
    ranks = next((size for size in SIZES if law.fewest <= size <= most and not law.vain_on((size,))), 1)
    with _timed("law", name=law.name, adapter=run.adapter_ref, told=f"{ranks} ranks") as told:
        told |= _outcome(_judged(law, run, ranks))
    return told


def _judged(law: Law, run: Run, ranks: int) -> Verdict | None:
    """The verdict on the first case of the law that is exact; None where none of a few is."""
    cases = cases_of(law, run, (ranks,))
    for case in enumeration.distinct(cases, _TRIES, seed_of(law.name, 0)):
        verdict = check_case(law, run.watching(law.observe), case, diagnose=False)
        if verdict.status != "no case":
            return verdict
    return None


def _outcome(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"told": "no small case of it is exact"}
    if verdict.finding is not None:
        found = verdict.finding
        said = f"{found.what}: got {found.got.splitlines()[0]}; replay with: fsdpcheck replay '{found.token}'"
        return {"problem": said, "code": verdict.exit_code}
    return {"problem": verdict.reason, "code": verdict.exit_code} if verdict.exit_code else {}


@contextmanager
def _timed(event: str, **more: Any) -> Iterator[dict[str, Any]]:
    """An event that has the seconds which its body took, and what that raised as its problem."""
    told: dict[str, Any] = {"event": event, "problem": "", "code": 0, **more}
    started = time.monotonic()
    try:
        yield told
    except FsdpcheckError as error:
        told |= {"problem": excerpt(str(error), WHOLE), "code": error.exit_code}
    except Exception:
        told |= {"problem": excerpt(traceback.format_exc().rstrip(), WHOLE), "code": INTERNAL}
    told["seconds"] = time.monotonic() - started
