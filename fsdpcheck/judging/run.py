"""Run: one engine and one adapter, bound; the only glue between a case and what came of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction

from torch import Tensor

from fsdpcheck import adapters, oracle
from fsdpcheck.adapters.contract import ArithmeticRule, FactorRule, Features, Observable, Stored, Trait, Use
from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import Case, KernelCase, TrainingCase, UserModelSpec
from fsdpcheck.case.validation import is_power_of_two
from fsdpcheck.engines._interpreter import interpreter
from fsdpcheck.engines.base import Engine
from fsdpcheck.errors import AdapterError, NoProgress, NotApplicable, NotSupported, Refused, UsageError, qualified
from fsdpcheck.execution import Execution, Failure, Line, RunRequest, SchedulePolicy
from fsdpcheck.execution.releases import Release
from fsdpcheck.judging import model_refusals, needs
from fsdpcheck.judging.drawing import Drawings
from fsdpcheck.judging.executions import Executions
from fsdpcheck.oracle import batched_step, certificate, standards
from fsdpcheck.program.probe import Probe, names_of
from fsdpcheck.workload import models
from fsdpcheck.workload.user_model.inspection import Seen

_REMEMBERED = 1024  # answers kept; one is a few small tensors


@dataclass
class Ran:
    """What came of the runs since it was last cleared: the newest execution, and how often each install was hit in all.

    A law may run several times, and a fault act in one of them alone. Failures are read from the newest. ``files`` and
    ``packages``, of what the processes of the ranks have loaded (see Execution), are never cleared.
    """

    newest: Execution | None = None
    hits: Counter[str] = field(default_factory=Counter)
    files: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    left: dict[str, None] = field(default_factory=dict)
    """What ranks or imports left changed of the process, a sentence each, in the order it was seen."""
    shared: dict[str, None] = field(default_factory=dict)
    """What simulated ranks share and write to (Execution.shared); never cleared."""
    lines: set[Line] = field(default_factory=set)
    """What ran of the implementation, if that was recorded; never cleared."""
    reached: dict[str, Fraction] = field(default_factory=dict)
    """How near a law's body says that a case came to a bound, by the kind of case; 1 is the bound."""
    branches: set[int] = field(default_factory=set)
    """Branches of the implementation that ran, where that is measured (Execution.branches)."""

    def reach(self, kind: str, share: Fraction) -> None:
        """A case of this kind came to ``share`` of what the law allows."""
        self.reached[kind] = max(share, self.reached.get(kind, share))

    def note(self, execution: Execution) -> None:
        self.newest = execution
        self.hits.update(execution.install_hits)
        self.branches |= execution.branches
        self.files |= execution.files
        self.packages |= execution.packages
        self.left.update(dict.fromkeys(execution.left))
        self.shared.update(dict.fromkeys(execution.shared))
        self.lines.update(*(rank.lines for rank in execution.ranks))

    def clear(self) -> None:
        self.newest = None
        self.hits.clear()
        self.left.clear()
        self.reached.clear()
        self.branches = set()


@dataclass(frozen=True)
class Run:
    """Runs cases of one adapter on one engine: ``run(case) -> Execution``, ``run.answer(case) -> oracle.Answer``.

    ``installs`` are in place in every run; ``observe`` is what a run records when its caller names nothing.
    Cheap to copy; copies share the engine. Session-scoped in pytest.
    """

    engine: Engine
    adapter_ref: str
    installs: tuple[str, ...] = ()
    observe: frozenset[Observable] = frozenset({"params"})
    schedule: SchedulePolicy = "forward"
    avoid: frozenset[Trait] = frozenset()
    """Traits that no case may demand although the adapter accepts them: ways around known defects."""
    own: UserModelSpec | None = None
    """The model of all cases, where it is a user's own."""
    too_wide: frozenset[Trait] = frozenset()
    """Traits to avoid on it too where there are others: an adapter may take float32 alone, or compute in few bits, for
    which cases are drawn on grids of those."""
    memory: str = "poison"
    """What new memory of the ranks holds (RunRequest.memory)."""
    lines: bool = False
    """Whether the lines of the implementation that run are recorded."""
    values: bool = False
    """Whether the numbers that pass through its functions are."""
    ran: Ran = field(default_factory=Ran, compare=False, repr=False)
    """What came of the runs; shared by copies."""
    executions: Executions = field(default_factory=Executions, compare=False, repr=False)
    """What other laws have asked for; shared by copies."""
    drawings: Drawings = field(default_factory=Drawings, compare=False, repr=False)
    """Cases that were drawn for one law or another; shared by copies."""
    measured: bool = False
    """Whether it is measured which lines run; then nothing is recalled, so that each law has its own."""
    recalls: bool = False
    """Whether an execution that another law asked for may stand for a run. Of simulated ranks alone: others vary."""

    def __call__(
        self,
        case: Case,
        observe: Iterable[Observable] | None = None,
        probes: Iterable[Probe | str] = (),
        installs: tuple[str, ...] = (),
        schedule: SchedulePolicy | None = None,
        save_to: str = "",
        load_from: str = "",
        spoiled: tuple[tuple[int, float], ...] = (),
        loss_times: float = 1.0,
        given_for: TrainingCase | None = None,
        using: tuple[Use, ...] = (),
        late: bool = False,
        rate: float = 1.0,
        records: int | None = None,
        noise_seed: int | None = None,
        releases: tuple[tuple[Release, ...], ...] | None = None,
    ) -> Execution:
        """One execution of ``case`` on all its ranks. From ``save_to`` on see RunRequest, but for ``given_for``.

        ``given_for``: the case for which targets of the instrument and C are computed, if that is another.

        Raises NotExact (the case is outside the exact domain), AdapterError (the adapter breaks its protocol),
        NotSupported, NoProgress, Refused (of a user's model). What the implementation itself does wrong is in
        ``Execution.failure``.
        """
        instrument, clip_norm = self._given(given_for or case)
        request = RunRequest(
            case=case,
            adapter=adapters.canonical(self.adapter_ref),
            observe=self.observe if observe is None else frozenset(observe) | {"params"},
            probes=names_of(probes),
            installs=self.installs + installs,
            instrument=instrument,
            clip_norm=clip_norm,
            schedule=schedule or self.schedule,
            save_to=save_to,
            load_from=load_from,
            spoiled=spoiled,
            loss_times=loss_times,
            averages=self.features.arithmetic.averaging != "none",
            using=using,
            late=late,
            memory=self.memory,
            lines=self.lines,
            values=self.values,
            rate=rate,
            records=records,
            noise_seed=noise_seed,
            releases=releases,
        )
        execution = self.execute(request)
        _raise_what_is_no_finding(execution.failure)
        needs.require_fit(self.features, execution, self._execution)
        if report := model_refusals.refused(execution) or model_refusals.raised_alone(execution):
            raise Refused(report)
        return execution

    def execute(self, request: RunRequest) -> Execution:
        """What comes of ``request``, which is noted, whatever it is."""
        execution = self._execution(request)
        self.ran.note(execution)
        return execution

    def _execution(self, request: RunRequest) -> Execution:
        """One that is remembered, or a new one."""
        engine = interpreter() if isinstance(request.case, KernelCase) else self.engine
        new = self.measured or request.save_to or request.load_from or request.releases
        if not self.recalls or engine.name != "simulated" or new:
            return engine.run(request)
        fields = {one.name: getattr(request, one.name) for one in dataclasses.fields(request)}
        if request.instrument is not None:
            fields["instrument"] = request.instrument.numpy().tobytes()
        key = tuple(fields.values())
        execution = self.executions.recall(key)
        if execution is None:
            execution = engine.run(request)
            if execution.failure is None:
                self.executions.keep(key, execution)
        return execution

    def answer(self, case: TrainingCase, forced: TrainingCase | None = None) -> oracle.Answer:
        """The single device's answer, proved exact. Computed once a case. Raises NotExact, UsageError.

        ``forced``: another case, whose optimizer's gradients are given to that of this one.
        """
        if self.tier(case) == "replay":
            raise UsageError(
                "a case of real numbers has no exact answer; next: judge it by replay (checks/shape_matched_replay.py)"
            )
        share = Fraction(case.step.normaliser) / case.mesh.data_ranks
        if self.features.arithmetic.divides_by_share and not is_power_of_two(share.denominator):
            raise NotApplicable(f"{self.declared.name} divides by N / W = {share}, which rounds")
        return _answer(case, self.features.factor, self.features.arithmetic, forced)

    def prepare(self, case: Case) -> None:
        """Compute what ``answer`` will be asked for. What it raises then, is not raised here."""
        if isinstance(case, TrainingCase) and self.own is None:
            with suppress(Exception):
                if self.tier(case) != "replay":
                    self.answer(case)

    def tier(self, case: Case) -> standards.Tier:
        """The standard of equality the case is judged by."""
        return standards.of(case, self.features.factor)

    def _given(self, case: Case) -> tuple[Tensor | None, float]:
        """(targets of the instrument, C in the units of the losses) that the ranks are given."""
        if not isinstance(case, TrainingCase):
            return None, math.inf
        if self.tier(case) != "replay":
            answer = self.answer(case)
            return answer.instrument, answer.clip_norm
        if case.step.private:
            return None, case.step.clip_norm * models.loss_scale(case)
        return oracle.plain_rows(case), math.inf

    def watching(self, observe: Iterable[Observable]) -> Run:
        """This run, recording ``observe`` (beside the parameters) unless a call says otherwise."""
        return replace(self, observe=frozenset(observe) | {"params"})

    def of(self, seen: Seen, real: bool) -> Run:
        """This run on a user's model, without the traits of cases that it cannot take. ``real``: as it is."""
        return replace(self, own=seen.own, avoid=self.avoid | seen.left_out, too_wide=seen.too_wide(real))

    def on(self, engine: Engine) -> Run:
        """This run on another engine."""
        return replace(self, engine=engine, ran=Ran(), executions=Executions())

    @property
    def declared(self) -> Declaration:
        """What the adapter declares, as data: its code runs where its ranks do, and not here."""
        return self.engine.declared(self.adapter_ref)

    def stored(self, folder: str) -> list[Stored]:
        """What the adapter finds in a checkpoint (see adapters.contract.Keeping)."""
        return self.engine.stored(self.adapter_ref, folder)

    def read(self, folder: str, case: TrainingCase) -> dict[str, Tensor]:
        """Parameters of an unsharded model of ``case`` that the adapter fills from a checkpoint, NaN elsewhere."""
        return self.engine.read(self.adapter_ref, folder, case)

    @property
    def features(self) -> Features:
        """The adapter's, without the traits to avoid."""
        features = self.declared.features
        rule, avoid = features.arithmetic, self.avoid
        if rule.compute == "dtype" and "float64" in rule.dtypes:
            avoid = avoid | self.too_wide
        return replace(features, accepts=features.accepts - avoid) if avoid else features

    @property
    def failure(self) -> Failure | None:
        """Why the newest execution did not complete, if it did not."""
        return self.ran.newest.failure if self.ran.newest else None

    @property
    def asked(self) -> RunRequest | None:
        """What the newest execution was asked for."""
        return self.ran.newest.request if self.ran.newest else None


def _answer(
    case: TrainingCase, factor: FactorRule, conventions: ArithmeticRule, forced: TrainingCase | None = None
) -> oracle.Answer:
    """The proved answer, one for all adapters whose conventions come to the same in this case."""
    factor = factor if case.step.private else FactorRule(norm=factor.norm)
    unused = conventions.unused
    if unused == "zero-if-private":
        unused = "zero" if case.step.private else "none"
    divides = conventions.divides_by_share and factor.nested  # elsewhere no bound asks
    rule = ArithmeticRule(conventions.averaging, divides, autocast=conventions.autocast)
    if forced is not None:
        return _proved(case, factor, replace(rule, unused=unused), forced)
    answer = _proved(case, factor, rule)
    if unused == "none" or not answer.leaves_unused:
        return answer
    return _proved(case, factor, replace(rule, unused=unused))


@functools.lru_cache(maxsize=_REMEMBERED)
def _proved(
    case: TrainingCase, factor: FactorRule, conventions: ArithmeticRule, forced: TrainingCase | None = None
) -> oracle.Answer:
    of_forced = None if forced is None else _proved(forced, factor, conventions)
    answer = oracle.answer(case, factor, conventions, of_forced)
    certificate.prove(case, answer)
    if case.model.own is not None and (case.model.own.names or case.arithmetic.compute != "dtype"):
        batched_step.require_same_alone(case, answer, conventions.autocast)
    return answer


def _raise_what_is_no_finding(failure: Failure | None) -> None:
    if failure is None:
        return
    if failure.kind == "adapter":
        raise (NotSupported if failure.exception == qualified(NotSupported) else AdapterError)(failure.text)
    if failure.kind == "no progress":
        raise NoProgress(failure.text)
    if failure.kind == "shared lock":
        raise NotSupported(failure.text)
