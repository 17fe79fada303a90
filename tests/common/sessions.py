"""Sessions as they are kept: of known verdicts, large, with a history, and of an adapter that says what it likes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.findings.ranks import Call, RankStood
from fsdpcheck.findings.tokens import Token, encode
from fsdpcheck.findings.verdict import Finding, Verdict
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan

FOLDER = "/home/me/project"
MINE = "train.py:MyAdapter"
CASE = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True),), features=2, units=(1,)),
    MeshSpec(2),
    BatchLayout("ragged", 4, counts=(4, 0)),
    StepSpec(micro_batches=2),
)
_MEMBERS = (0, 1)
_CALL = Call("0 [0, 1] #0", "all_reduce", "all_reduce(float64[3, 2]) sum #0", _MEMBERS, f"{FOLDER}/train.py:30")
RANKS = (
    RankStood(0, "blocked", _CALL.key, (1,), f"{FOLDER}/train.py:30", (_CALL,)),
    RankStood(1, "finished"),
)


def finding(law: str = "training.plain", adapter: str = MINE, **other: Any) -> Finding:
    """A deadlock of one rank that waits for another, at a line of the user's."""
    known = {
        "law": law,
        "guarantee": f"The guarantee of {law}.",
        "adapter": adapter,
        "engine": "simulated",
        "kind": "deadlock",
        "place": f"{FOLDER}/train.py:30",
        "what": "the run did not complete",
        "got": f"deadlock: no rank can move (W = 2)\n  rank 0: in all_reduce, at {FOLDER}/train.py:30",
        "wanted": "all ranks finish",
        "where": "rank 0 blocked, rank 1 finished",
        "cause": "the collectives depend on whether a rank has samples",
        "case": json.loads(CASE.to_json()),
        "words": CASE.describe(),
        "token": encode(Token(law, adapter, CASE)),
        "when": "holds with one change: one rank\nonly cases with empty-rank fail: 9 of them; none of 21 others does",
        "lines": f"{FOLDER}/train.py:20 in Trainer.step: continue",
        "ranks": RANKS,
    }
    return Finding(**{**known, **other})


def ledger(
    verdicts: Iterable[Verdict], adapters: Sequence[str] = (MINE,), at: str = "2026-11-21T08:00+00:00", **other: Any
) -> Ledger:
    """A session that ended, with these verdicts in the order of the plan."""
    told = {(one.law, one.adapter): one for one in verdicts}
    laws = tuple(dict.fromkeys(law for law, _ in told))
    known: dict[str, Any] = {
        "plan": Plan(tuple(adapters)),
        "laws": laws,
        "began": at,
        "folder": FOLDER,
        "versions": {"python": "3.11", "torch": "2.13.0"},
        "guarantees": {law: f"The guarantee of {law}." for law in laws},
        "unaccepted": {ref: ["adam", "tied"] for ref in adapters},
        "verdicts": {(law, ref): told[law, ref] for ref in adapters for law in laws if (law, ref) in told},
        "ended": True,
    }
    return Ledger(**{**known, **other})


def mixed(at: str = "2026-11-21T08:00+00:00") -> Ledger:
    """Of one adapter: a verdict of each kind, two findings of one root and one of another, and a law not reached."""
    census = {"W=1": 8, "W=2": 4, "tier exact": 9, "tier any C": 3, "ragged": 5, "bias": 2}
    elsewhere = finding(kind="value", place="", got="7.0", wanted="7.5", ranks=(), cause="", lines="", when="",
                        where="step 0, rank 1, units.0.linear0.weight[0, 1]; 1 of 6 elements differ")  # fmt: skip
    verdicts = [
        Verdict("norms.sum", MINE, "holds", 12, 3, 1.5, census=census, undrawn=("adamw",), never=("a clipped sample",)),
        Verdict("norms.mixed", MINE, "not promised", reason="no promise 'norms': it has none"),
        Verdict("state.saved", MINE, "error", 2, reason="Traceback: it broke\n  wanted a state", exit_code=2),
        Verdict("state.shape", MINE, "not asked", reason="on 2 ranks alone"),
        Verdict("training.plain", MINE, "finding", 31, 0, 4.0, census=census, finding=finding(), exit_code=1,
                behind=(elsewhere,)),
        Verdict("training.gradients", MINE, "finding", 9, 0, 2.0, finding=finding("training.gradients"), exit_code=1),
    ]  # fmt: skip
    found = ledger(verdicts, at=at)
    return dataclasses.replace(found, laws=(*found.laws, "zero.unreached"))


def large(count: int = 119, adapters: int = 4, at: str = "2026-11-21T08:00+00:00", broken: int = 1) -> Ledger:
    """``count`` laws in 17 chapters on several adapters, each of which has another finding, where ``broken``."""
    refs = [f"package{number}.implementation:adapter" if number else MINE for number in range(adapters)]
    verdicts = []
    for number in range(count):
        law = f"chapter{number % 17:02}.law-{number}"
        for place, ref in enumerate(refs):
            if broken and number % 40 == 7 * place:
                found = finding(law, ref)
                verdicts.append(Verdict(law, ref, "finding", 9, finding=found, exit_code=1))
            elif (number + place) % 5 == 0:
                verdicts.append(Verdict(law, ref, "not promised", reason="no promise"))
            else:
                census = {"W=1": 10, "W=2": number % 7, "tier exact": 10, "ragged": 3 * place}
                verdicts.append(Verdict(law, ref, "holds", 10 + number % 7, 1, 0.5, census=census))
    ordered = sorted(verdicts, key=lambda one: one.law)
    return ledger(ordered, refs, at)


HOSTILE = (
    '</pre></script><script>document.title="taken"</script><img src=x onerror="document.title=1">"\'`|]]>\x1b[31m\u202e'
)
"""What an adapter may say to whoever reads a report of it."""


def hostile() -> Ledger:
    """A session of an adapter that says HOSTILE wherever it can say something."""
    names = ("place", "what", "got", "wanted", "where", "cause", "note", "when", "stage", "lines", "words", "token")
    ranks = tuple(
        dataclasses.replace(
            one, state=HOSTILE, where=HOSTILE, calls=(dataclasses.replace(_CALL, op=HOSTILE, what=HOSTILE),)
        )
        for one in RANKS
    )
    ref = f"{HOSTILE}.py:adapter"
    broken = dataclasses.replace(finding(adapter=ref), **dict.fromkeys(names, HOSTILE), ranks=ranks)
    verdicts = [
        Verdict("training.plain", ref, "finding", 1, finding=broken, exit_code=1, left=(HOSTILE,)),
        Verdict("training.other", ref, "error", reason=f"{HOSTILE}\n```\n::error::{HOSTILE}", exit_code=2),
        Verdict("training.third", ref, "not promised", reason=HOSTILE),
    ]
    return ledger(verdicts, [ref], notes=(HOSTILE,), errors=[(HOSTILE, 2)])
