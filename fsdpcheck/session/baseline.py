"""Baseline: what a gate must judge at least, kept with the repository; what a session lacks of it, in sentences.

A session is green by itself where every chosen check holds: one that chose less is green as well. A baseline is the
denominator that is missing then: checks, numbers of ranks, accepted traits and kinds of cases of a session that held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from fsdpcheck import __version__
from fsdpcheck.case import Trait
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.errors import UsageError, explain, reading
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.session.ledger import Ledger

SCHEMA: Final = 1
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
_NAMED: Final = 6
"""Most laws that are named in one sentence."""


@dataclass(frozen=True)
class Baseline:
    """``checks``: (law, adapter) -> kinds of cases that the law names and that were not judged, in words.

    ``accepted``: adapter -> traits that it accepts, of those of that release. ``ranks``: adapter -> numbers of ranks of
    judged cases. ``laws``: files and modules of a user's own laws, which run where everything is judged. A check whose
    findings are all waived is one of them: what is waived must go on being judged.
    """

    profile: str
    avoided: tuple[str, ...]
    accepted: Mapping[str, tuple[str, ...]]
    ranks: Mapping[str, tuple[int, ...]]
    checks: Mapping[tuple[str, str], tuple[str, ...]]
    laws: tuple[str, ...] = ()

    def missing(self, ledger: Ledger) -> list[str]:
        """What ``ledger`` lacks of it, a sentence each; nothing where all of it was judged again."""
        now = of(ledger)
        return [*_less(self, now), *_unjudged(self, ledger), *_kinds(self, now)]

    def lacks(self, ledger: Ledger) -> str:
        """What ``ledger`` judged beyond it, which may be judged no more without anybody noticing; "" for nothing."""
        beyond: dict[str, list[str]] = {}
        for law, ref in of(ledger).checks:
            if (law, ref) not in self.checks:
                beyond.setdefault(ref, []).append(law)
        if not beyond:
            return ""
        many = sum(map(len, beyond.values()))
        named = "; ".join(f"{ref}: {_some(laws)}" for ref, laws in beyond.items())
        return f"{many} check{'s' * (many > 1)} that the baseline lacks, and does not hold anybody to: {named}"

    def to_json(self) -> str:
        """As it is committed, a check a line."""
        checks = [{"law": law, "adapter": ref, "never": list(never)} for (law, ref), never in self.checks.items()]
        whole: dict[str, Any] = {
            "schema": SCHEMA,
            "fsdpcheck": __version__,
            "profile": self.profile,
            "avoided": list(self.avoided),
            "accepted": {ref: list(names) for ref, names in self.accepted.items()},
            "ranks": {ref: list(sizes) for ref, sizes in self.ranks.items()},
            **({"laws": list(self.laws)} if self.laws else {}),
        }
        head = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in whole.items()]
        rows = ",\n".join(f"    {json.dumps(check)}" for check in checks)
        return "\n".join(["{", *head, f'  "checks": [\n{rows}\n  ]', "}\n"])


def of(ledger: Ledger) -> Baseline:
    """What ``ledger`` judged and found to hold, or whose findings are waived."""
    known = frozenset(get_args(Trait))
    held = [verdict for verdict in ledger.verdicts.values() if verdict.status == "holds" or is_waived(ledger, verdict)]
    ranks: dict[str, set[int]] = {}
    for verdict in held:
        sizes = (int(label[2:]) for label in verdict.census if label.startswith("W="))
        ranks.setdefault(verdict.adapter, set()).update(sizes)
    return Baseline(
        profile=ledger.plan.profile,
        avoided=tuple(sorted(ledger.plan.avoid)),
        accepted={ref: tuple(sorted(known - {*names})) for ref, names in ledger.unaccepted.items()},
        ranks={ref: tuple(sorted(sizes)) for ref, sizes in ranks.items()},
        checks={(verdict.law, verdict.adapter): tuple(verdict.never) for verdict in held},
        laws=tuple(sorted(ledger.plan.laws_from)),
    )


def is_waived(ledger: Ledger, verdict: Verdict) -> bool:
    """Whether a law breaks, and every finding of it is waived."""
    return verdict.status == "finding" and all(finding.token in ledger.waived for finding in verdict.findings)


def read(path: Path) -> Baseline:
    """The baseline that is committed. Raises UsageError for a file that is none."""
    then = "make it of a session in which all holds: fsdpcheck gate --update; commit it"
    try:
        data = json.loads(reading.text(path))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']!r}")
        if data["profile"] not in PROFILES or not data["checks"]:
            raise ValueError(f"profile {data['profile']!r}, {len(data['checks'])} checks")
        return Baseline(
            profile=data["profile"],
            avoided=tuple(data["avoided"]),
            accepted={ref: tuple(names) for ref, names in data["accepted"].items()},
            ranks={ref: tuple(sizes) for ref, sizes in data["ranks"].items()},
            checks={(one["law"], one["adapter"]): tuple(one["never"]) for one in data["checks"]},
            laws=tuple(data.get("laws", ())),
        )
    except _MALFORMED as error:
        got = str(error) if isinstance(error, reading.Unreadable) else f"{type(error).__name__}: {error}"
        raise UsageError(explain(f"there is no baseline in {path}", got=got, then=then)) from error


def _less(wanted: Baseline, now: Baseline) -> Iterator[str]:
    """What of the session as a whole is less than it was."""
    if PROFILES[now.profile] < PROFILES[wanted.profile]:
        yield f"the profile is {now.profile}, the baseline's is {wanted.profile}: fewer cases a law"
    if strange := sorted({*now.laws} - {*wanted.laws}):
        yield f"laws of {', '.join(strange)}, which the baseline has not: such a file runs where everything is judged"
    if avoided := sorted({*now.avoided} - {*wanted.avoided}):
        yield f"avoided, and not so in the baseline: {', '.join(avoided)}"
    for ref, names in wanted.accepted.items():
        if ref in now.accepted and (refused := sorted({*names} - {*now.accepted[ref]})):
            yield f"{ref} no longer accepts {', '.join(refused)}"
    for ref, sizes in wanted.ranks.items():
        if ref in now.ranks and (lost := sorted({*sizes} - {*now.ranks[ref]})):
            yield f"{ref} was judged on no case of {', '.join(map(str, lost))} ranks"


def _unjudged(wanted: Baseline, ledger: Ledger) -> Iterator[str]:
    """Checks that no longer hold, by what became of them. Those that broke are told by the session."""
    laws: dict[tuple[str, str], list[str]] = {}
    for law, ref in wanted.checks:
        verdict = ledger.verdicts.get((law, ref))
        if verdict is None:
            laws.setdefault((ref, "not among the chosen checks, or not reached"), []).append(law)
        elif verdict.status in ("not promised", "not asked"):
            laws.setdefault((ref, f"{verdict.status}: {verdict.reason}"), []).append(law)
    for (ref, why), names in laws.items():
        yield f"{ref}: {_some(names)}: {why}"


def _some(names: Sequence[str]) -> str:
    """The first few of some laws, and how many more there are."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _kinds(wanted: Baseline, now: Baseline) -> Iterator[str]:
    """Kinds of cases that a check had judged and has not now."""
    for (law, ref), never in now.checks.items():
        before = wanted.checks.get((law, ref))
        if before is not None and (lost := [kind for kind in never if kind not in before]):
            yield f"{law} on {ref} was judged on no such case any more: {', '.join(lost)}"
