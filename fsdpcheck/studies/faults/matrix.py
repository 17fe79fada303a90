"""The matrix: what each law says of each planted fault. The first kill ends a row, or every law is asked."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from torch import Tensor

from fsdpcheck.adapters.contract import Stored
from fsdpcheck.case import KernelCase, TrainingCase
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NO_PROGRESS
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.findings import tokens
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import nondeterminism, order
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.executions import Executions
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Ran, Run
from fsdpcheck.processes import messages
from fsdpcheck.studies.faults.origins import Planted

Found = TypeVar("Found")
Place = tuple[str, int]
"""(file, line)."""
Outcome = Literal["killed", "raises at once", "survived", "changes nothing", "never ran", "not asked"]
OUTCOMES: Final[Mapping[Outcome, str]] = {
    "killed": "a law breaks, and holds in the same case without the fault",
    "raises at once": "the first case of the first law ends in an exception: any test would find it",
    "survived": "results differ, and no law that was asked breaks",
    "changes nothing": "it ran, and no result of any rank differs by a bit",
    "never ran": "no case that was judged ran what is altered",
    "not asked": "no law that was chosen is promised by its adapter and judged a case",
}
"""What may become of a fault, the worst for the laws in the third place."""


@dataclass(frozen=True)
class Kill:
    """A law that breaks; ``what``: the first line of its finding or error."""

    law: str
    adapter: str
    kind: str
    what: str
    token: str
    cases: int


@dataclass(frozen=True)
class Row:
    """One fault. ``laws``: how many pairs of law and adapter were asked; ``cases``: how many cases judged in all."""

    fault: str
    outcome: Outcome
    says: str
    where: str = ""
    installs: tuple[str, ...] = ()
    kills: tuple[Kill, ...] = ()
    laws: int = 0
    cases: int = 0
    note: str = ""

    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Row:
        return Row(
            **{**data, "installs": tuple(data["installs"]), "kills": tuple(Kill(**one) for one in data["kills"])}
        )


@dataclass
class Watching:
    """An engine that notes how often what is installed ran, and whether it makes any difference.

    Until it has made one each run is repeated without it. So what is saved is saved without it too, and loaded again:
    what is saved otherwise shows when it is loaded or read. Where a case without it gives other results each time, as
    noise of a secure generator does, or one with it gave others once, it makes none.
    """

    engine: Engine
    files: dict[str, str] = field(default_factory=dict)
    hits: int = 0
    difference: str = ""
    """The first that it makes, and in which case."""
    law: str = ""
    """Of whose cases the runs are."""
    _besides: dict[str, str] = field(default_factory=dict)
    """Folder that was saved into -> the one without what is installed; names as long, for a collective takes them."""

    _varying: list[str] = field(default_factory=list)
    """Folders into which something else is saved each time."""

    name: str = "simulated"

    def run(self, request: RunRequest) -> Execution:
        execution = self.engine.run(request)
        self.hits += sum(execution.install_hits.values())
        self.files |= execution.files
        compared = request.installs and not isinstance(request.case, KernelCase) and not self._varies(request.load_from)
        if compared and not self.difference:
            self._compare(request, execution)
        return execution

    def _compare(self, request: RunRequest, execution: Execution) -> None:
        if request.save_to:
            self._besides[request.save_to] = f"{request.save_to[:-1]}~"
        save_to, load_from = self._beside(request.save_to), self._beside(request.load_from)
        plain = self.engine.run(replace(request, installs=(), save_to=save_to, load_from=load_from))
        found = nondeterminism.first_difference(plain, execution)
        if found is not None and self._repeats(plain, execution):
            where, value, other = found
            token = tokens.encode(tokens.Token(self.law, request.adapter, request.case, request.installs))
            self.difference = f"{where}: {other} instead of {value}, in {token}"
        elif found is not None and request.save_to:
            self._varying.append(request.save_to)

    def _repeats(self, plain: Execution, execution: Execution) -> bool:
        """Whether a run without what is installed gives the same once more, and one with it something else again."""
        again = self._again(plain, "^")
        if nondeterminism.first_difference(plain, again) is not None:
            return False
        return nondeterminism.first_difference(again, self._again(execution, "+")) is not None

    def _again(self, execution: Execution, mark: str) -> Execution:
        """One more run; it saves into a folder of its own."""
        saved = execution.request.save_to
        again = self.engine.run(replace(execution.request, save_to=saved and f"{saved[:-1]}{mark}"))
        if saved:
            shutil.rmtree(again.request.save_to, ignore_errors=True)
        return again

    def stored(self, reference: str, folder: str) -> list[Stored]:
        return self._compared(partial(self.engine.stored, reference), folder)

    def read(self, reference: str, folder: str, case: TrainingCase) -> dict[str, Tensor]:
        return self._compared(lambda place: self.engine.read(reference, place, case), folder)

    def clean(self) -> None:
        """Remove what was saved for comparison."""
        for folder in self._besides.values():
            shutil.rmtree(folder, ignore_errors=True)

    def _compared(self, ask: Callable[[str], Found], folder: str) -> Found:
        found = ask(folder)
        if not self.difference and not self._varies(folder):
            other = messages.dumps(found) != messages.dumps(ask(self._beside(folder)))
            self.difference = f"what a checkpoint holds, in a case of {self.law}" if other else ""
        return found

    def _varies(self, folder: str) -> bool:
        return any(Path(folder).is_relative_to(saved) for saved in self._varying)

    def _beside(self, folder: str) -> str:
        for saved, beside in self._besides.items():
            if Path(folder).is_relative_to(saved):
                return beside + folder[len(saved) :]
        return folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


@dataclass
class Matrix:
    """Puts faults to the laws that one of ``globs`` matches, by ``cases`` cases of ``profile`` a law, or all of it.

    ``every``: all laws are asked, also after a kill. ``world_sizes``: () for those of the profile.
    """

    globs: tuple[str, ...] = ("*",)
    profile: str = "quick"
    cases: int | None = None
    world_sizes: tuple[int, ...] = ()
    every: bool = False
    engine: Engine = field(default_factory=SimulatedEngine)
    files: dict[str, str] = field(default_factory=dict)
    """Path -> hash of what ranks had loaded by the newest row."""
    lines: Mapping[tuple[str, str], Set[Place]] = field(default_factory=dict)
    """(adapter, law) -> what it runs of the implementation: measured where mutants are put in (coverage.py)."""
    _bases: dict[str, Run] = field(default_factory=dict)
    _sound: dict[tuple[str, str], bool] = field(default_factory=dict)
    """(adapter, law) -> whether the law ends in no error without a fault; of those that did with one."""

    def laws(self, adapter: str) -> list[Law]:
        """Those that are asked of an adapter: its promises."""
        features = self._base(adapter).declared.features
        found = (law for name, law in chapters().items() if any(fnmatchcase(name, glob) for glob in self.globs))
        return [law for law in found if not law.not_promised(features)]

    def unplanted(self, adapter: str, law: Law) -> Verdict:
        """What the law says without a fault, by runs of its own."""
        return self._judged(law, replace(self._base(adapter), measured=True, ran=Ran()))

    def row(self, planted: Planted) -> Row:
        """What becomes of one fault."""
        told = Row(planted.name, "not asked", planted.says, planted.where, planted.installs)
        watching, kills, notes, asked = Watching(self.engine), [], [], 0
        try:
            for adapter, law in self._pairs(planted):
                watching.law = law.name
                verdict = self._judged(law, self._planted(adapter, planted, watching))
                asked, told = asked + 1, replace(told, cases=told.cases + verdict.cases)
                if verdict.status in ("finding", "error") and (kill := self._kill(law, adapter, verdict)):
                    kills.append(kill)
                    if not self.every:
                        break
                elif verdict.status not in ("holds", "too few cases", "no case", "not asked"):
                    notes.append(f"{law.name}: {verdict.status}: {_line(verdict.reason)}")
        finally:
            watching.clean()
        self.files |= watching.files
        told = replace(told, kills=tuple(kills), laws=asked)
        told = replace(told, outcome=self._outcome(told, watching))
        notes += [f"differs: {watching.difference}"] if told.outcome == "survived" else []
        return replace(told, note="; ".join(dict.fromkeys(notes)))

    def _outcome(self, told: Row, watching: Watching) -> Outcome:
        if told.kills:
            first = told.kills[0]
            at_once = (first.kind == "raised" and told.cases <= 1) or first.kind == "error"
            return "raises at once" if at_once else "killed"
        if not told.cases:
            return "not asked"
        if not watching.hits:
            return "never ran"
        return "survived" if watching.difference else "changes nothing"

    def _kill(self, law: Law, adapter: str, verdict: Verdict) -> Kill | None:
        """None where the law breaks in that case, or ends in an error, without the fault as well: it says nothing."""
        finding = verdict.finding
        if finding is None:
            if (adapter, law.name) not in self._sound:
                self._sound[adapter, law.name] = self.unplanted(adapter, law).status != "error"
            if not self._sound[adapter, law.name]:
                return None
            kind = "no progress" if verdict.exit_code == NO_PROGRESS else verdict.status
            return Kill(law.name, adapter, kind, _line(verdict.reason), "", verdict.cases)
        token = tokens.decode(finding.token)
        if check_case(law, self._base(adapter), token.case, diagnose=False).status == "finding":
            return None
        return Kill(law.name, adapter, finding.kind, _line(finding.what), finding.token, verdict.cases)

    def _pairs(self, planted: Planted) -> Iterator[tuple[str, Law]]:
        """(adapter, law) to ask: first those that are said to break, then those that a session asks first."""
        asked: set[str] = set()
        for adapter in planted.adapters:
            laws = [law for law in self.laws(adapter) if law.name not in asked and self._meets(planted, adapter, law)]
            if planted.lines:  # of a line that several adapters run, one is asked each law
                asked |= {law.name for law in laws}
            yield from ((adapter, law) for law in sorted(laws, key=lambda law: _rank(law, planted)))

    def _meets(self, planted: Planted, adapter: str, law: Law) -> bool:
        if not planted.lines:
            return True
        return not self.lines[adapter, law.name].isdisjoint(planted.lines)

    def _judged(self, law: Law, run: Run) -> Verdict:
        return check_law(law, run, self.profile, self.world_sizes, shrink=False, most=self.cases)

    def _base(self, adapter: str) -> Run:
        if adapter not in self._bases:
            self._bases[adapter] = Run(self.engine, adapter)
        return self._bases[adapter]

    def _planted(self, adapter: str, planted: Planted, engine: Watching) -> Run:
        base = self._base(adapter)
        return replace(base, engine=engine, installs=planted.installs, ran=Ran(), executions=Executions())


def _rank(law: Law, planted: Planted) -> tuple[bool, int]:
    expected = bool(planted.expected) and fnmatchcase(law.name, planted.expected)
    return not expected, order.rank(law.name)


def _line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def counts(rows: Iterable[Row]) -> dict[Outcome, int]:
    """How many became what, in the order of OUTCOMES."""
    found = [row.outcome for row in rows]
    return {outcome: found.count(outcome) for outcome in OUTCOMES}
