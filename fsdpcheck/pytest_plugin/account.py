"""What a pytest session promised to check and what it checked, as a ledger; what it lacks makes it fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.errors import FINDING
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.report import conditions, document, unjudged_cases
from fsdpcheck.session import baseline, requirements
from fsdpcheck.session.journal import Journal
from fsdpcheck.session.ledger import Ledger
from fsdpcheck.session.plan import Plan

NOT_RUN: Final = ("not promised", "not asked", "no case", "too few cases", "not supported")
PROMISED: Final = "fsdpcheck_promised"
VANISHED: Final = "fsdpcheck_vanished"
RANKS: Final = "fsdpcheck_ranks"
TOLD: Final = "fsdpcheck"
"""What a report of a test has as an attribute, which crosses from the processes of pytest-xdist."""
_NAMED: Final = 5

Pair = tuple[str, str]


class Account:
    """How many checks were promised, and how many ran; a check is a law on an adapter that promises it.

    A skip that silently turned 47 checks into 1 and stayed green is the trap (scikit-learn #33003).
    """

    def __init__(self, plan: Plan) -> None:
        self.ledger = Ledger(replace(plan, adapters=()))
        self.promised: dict[str, Pair] = {}
        """The test of each promised check -> its law and adapter."""
        self.vanished: dict[str, None] = {}
        """Tests of laws that were collected, and that a hook took away without deselecting them."""
        self.told: list[tuple[str, Pair, str]] = []
        """(test, law and adapter, status) of each verdict."""
        self.unfailed: dict[str, str] = {}
        """Test that did not fail -> "passed", "was skipped" or "xfail"."""
        self.verdicts: Counter[str] = Counter()
        self.ranks: Counter[str] = Counter()
        """Kind of ranks of the fixture ``world`` -> how often there were some."""
        self.left: dict[str, None] = {}
        """What adapters left changed of their processes."""
        self._profiles = {plan.profile}

    @property
    def ran(self) -> int:
        return self.verdicts.total() - sum(self.verdicts[status] for status in NOT_RUN)

    @property
    def missing(self) -> list[Pair]:
        """Promised checks that did not run."""
        heard = {test for test, _, status in self.told if status not in NOT_RUN}
        return [pair for test, pair in self.promised.items() if test not in heard]

    @property
    def promises(self) -> int:
        """Promised checks, those among them that a test asked for by itself."""
        return len(self.promised) + sum(
            test not in self.promised and status not in NOT_RUN[:2] for test, _, status in self.told
        )

    @property
    def hidden(self) -> list[tuple[str, Pair]]:
        """(test, law and adapter) of checks that do not hold, and whose tests did not fail."""
        broken = ((test, pair) for test, pair, status in self.told if status not in ("holds", *NOT_RUN))
        return [(test, pair) for test, pair in broken if test in self.unfailed]

    def add(self, test: str, told: Mapping[str, Any]) -> None:
        """Take in what ``test`` told of one check."""
        verdict = Verdict.from_data(told["verdict"])
        self.verdicts[verdict.status] += 1
        self.told.append((test, (verdict.law, verdict.adapter), verdict.status))
        self.left.update(dict.fromkeys(f"{verdict.adapter}: {what}; it was put back" for what in verdict.left))
        self._enter(verdict, told)

    def _enter(self, verdict: Verdict, told: Mapping[str, Any]) -> None:
        """Into the ledger: of two verdicts on one check the one that is no pass stands."""
        ledger, pair = self.ledger, (verdict.law, verdict.adapter)
        plan, avoid = ledger.plan, (*ledger.plan.avoid, *told["avoid"])
        self._profiles |= {told["profile"]}
        ledger.plan = replace(
            plan,
            adapters=tuple(dict.fromkeys((*plan.adapters, verdict.adapter))),
            avoid=tuple(dict.fromkeys(avoid)),
            profile=min(self._profiles, key=lambda name: PROFILES[name]),
        )
        ledger.laws = tuple(dict.fromkeys((*ledger.laws, verdict.law)))
        ledger.unaccepted[verdict.adapter] = list(told["unaccepted"])
        ledger.versions = dict(told["versions"]) or ledger.versions
        before = ledger.verdicts.get(pair)
        if before is None or before.status in ("holds", *NOT_RUN[:2]):
            ledger.verdicts[pair] = verdict

    def end(self, require: Sequence[str], laws: Iterable[str], base: str, asked: Iterable[str]) -> list[str]:
        """What the session lacks, a sentence each: promised checks that did not run or broke unseen, what is required.

        ``require``: globs over ``laws``. ``base``: the file of a baseline, "" for none. ``asked``: adapters that were
        named, of which nothing may have been told. Raises UsageError for a baseline that is none.
        """
        plan = self.ledger.plan
        promising = (adapter for _, adapter in self.promised.values())
        self.ledger.plan = replace(plan, adapters=tuple(dict.fromkeys((*asked, *promising, *plan.adapters))))
        lacks = [f"only {self.ran} of {self.promises} promised checks ran: this is a failure"] * bool(self.missing)
        lacks += [f"not run: {_some(self.missing)}"] * bool(self.missing)
        if self.vanished:
            named = ", ".join(list(self.vanished)[:_NAMED]) + ", ..." * (len(self.vanished) > _NAMED)
            then = "deselect them (-k, --deselect), which is counted, or leave them"
            lacks.append(
                f"{len(self.vanished)} tests of laws were taken away by a hook of conftest.py: {named}; next: {then}"
            )
        lacks += requirements.lacking(self.ledger, require, laws) if require else []
        wanted = baseline.read(Path(base)) if base else None
        lacks += self._of_hidden(wanted.checks if wanted else ())
        lacks += wanted.missing(self.ledger) if wanted else []
        self.ledger.errors += [(sentence, FINDING) for sentence in lacks]
        self.ledger.plan = plan
        return lacks

    def _of_hidden(self, wanted: Container[Pair]) -> Iterator[str]:
        """What is red though no test is: ``wanted`` are the checks that a baseline says hold."""
        for test, pair in self.hidden:
            how, law = self.unfailed[test], _some([pair])
            if how != "xfail" and self.promised.get(test) == pair:
                yield f"{law} does not hold, and its test {how}; next: let it fail by what law.check() raises"
            elif pair in wanted:
                how = "is marked xfail" if how == "xfail" else how
                then = "mend it, or take it out of the baseline (fsdpcheck gate --update)"
                yield f"{law} does not hold, as the baseline says, and its test {how}; next: {then}"

    def write(self, name: str) -> None:
        """The document of the session, as ``fsdpcheck run --json`` writes it. Raises UsageError where it cannot."""
        Journal(Path(name), self.ledger.plan).close(document.document(self.ledger))

    def lines(self, plan: Plan) -> list[str]:
        """The account as it is printed."""
        judged = [one for one in self.ledger.verdicts.values() if one.cases]
        holds = [(one.adapter, one.law, one.never) for one in judged if one.status == "holds"]
        avoided = unjudged_cases.avoided(plan.avoid, "--fsdpcheck-avoid")
        said = conditions.sentences(one.law for one in judged)
        known = [f"{_some([pair])} does not hold: {test}: {self.unfailed[test]}" for test, pair in self.hidden]
        return [str(self), *said, *avoided, *unjudged_cases.never(holds), *known, *self.left]

    def __str__(self) -> str:
        statuses = ", ".join(f"{count} {status}" for status, count in sorted(self.verdicts.items()))
        cases = sum(verdict.cases for verdict in self.ledger.verdicts.values())
        return f"{self.promises} checks promised, {self.ran} ran, {cases} distinct cases ({statuses or 'none'})"


def _some(pairs: Sequence[Pair]) -> str:
    named = ", ".join(f"{law} on {adapter}" for law, adapter in pairs[:_NAMED])
    return named + (f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else "")


class Accountant:
    """Fills in the account from the reports of this session, which under pytest-xdist come from all its workers."""

    def __init__(self, account: Account) -> None:
        self._account = account

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        for told in getattr(report, TOLD, ()):
            self._account.add(report.nodeid, told)
        how = "xfail" if hasattr(report, "wasxfail") else report.outcome
        if how == "failed":
            self._account.unfailed.pop(report.nodeid, None)  # a subtest that passed is no test that passed
        else:
            self._account.unfailed[report.nodeid] = "was skipped" if how == "skipped" else how

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """A worker of pytest-xdist ended; each collects everything, so what one of them promises, all do."""
        for test, pair in getattr(node, "workeroutput", {}).get(PROMISED, {}).items():
            self._account.promised[test] = (pair[0], pair[1])
        self._account.ranks.update(getattr(node, "workeroutput", {}).get(RANKS, {}))
        self._account.vanished |= dict.fromkeys(getattr(node, "workeroutput", {}).get(VANISHED, ()))


class Collected:
    """Sees what is collected before any other hook does, and what is deselected; what is then gone has vanished."""

    def __init__(self, account: Account, is_law: Callable[[pytest.Item], bool]) -> None:
        self._account, self._is_law = account, is_law
        self._tests: dict[str, None] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        self._tests |= dict.fromkeys(item.nodeid for item in items if self._is_law(item))
        yield

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._tests.pop(item.nodeid, None)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        there = {item.nodeid for item in session.items}
        self._account.vanished |= dict.fromkeys(test for test in self._tests if test not in there)
