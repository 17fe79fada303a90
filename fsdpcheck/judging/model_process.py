"""What has to call the model of a case: called here, or, where the model is a user's own, in a process of its own.

Whoever judges never imports a user's model. Functions of fsdpcheck that call it run in a third process, in which no
implementation is imported either; what they take and give back is plain data. What such a function asks of an engine
comes back to whoever judges, so ranks, executions and what is noted of them stay here.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeVar, TypeVarTuple

from fsdpcheck.case import Case, UserModelSpec, user_model
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.findings.cause import Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.run import Run
from fsdpcheck.loading import references
from fsdpcheck.processes.remote import Died, Remote
from fsdpcheck.workload.user_model import inspection, loading

_SERVICE: Final = "fsdpcheck.judging.model_service"
CAUSES: Final = f"{_SERVICE}:causes"
"""What tells the causes of a violation that was given back by its number."""
_NAMED: Final = 5
"""Most of what was changed that is named."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True)
class BoundRun:
    """A Run but for its engine, which is called ``engine``, and what it notes."""

    engine: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class NamedLaw:
    """A law by its name. ``source``: the file or module of a user's own law; "" of one of fsdpcheck's."""

    name: str
    source: str


@dataclass(frozen=True)
class Call:
    """Call ``function``, "fsdpcheck.module:name", with the arguments; the answer is Returned.

    ``own``: references to the model, batch, loss and optimizer. ``kept``: numbers of violations whose causes may be
    asked for yet.
    """

    function: str
    arguments: tuple[Any, ...]
    own: tuple[str, ...]
    kept: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Broken:
    """A Violation. ``number``: what its causes are requested by; None where ``cause`` is known."""

    what: str
    got: str
    wanted: str
    where: str
    cause: str
    despite: bool
    number: int | None


@dataclass(frozen=True)
class Returned:
    """What a Call came to: ``value``, or the violation that was raised.

    ``changed``: what stands for something else in that process than before the model was imported, a sentence each.
    ``files`` and ``packages``: what it has loaded (see provenance.Loaded).
    """

    value: Any = None
    broken: Broken | None = None
    changed: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OfEngine:
    """What a function asks of the engine of its run; the answer is what the method gives."""

    method: Literal["run", "declared", "stored", "read"]
    arguments: tuple[Any, ...]


def called(case: Case, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """``function``, which calls the model of ``case``, with these arguments. Raises what it raises.

    Where the model is a user's own: UsageError if it ends its process, or changes what judges.
    """
    own = user_model(case)
    if own is None:
        return function(*arguments)
    found: T = _of(own.references).call(_dotted(function), arguments)
    return found


def judge(law: Law, case: Case, run: Run) -> None:
    """Have ``law`` judge ``case``. Raises what its body raises."""
    if user_model(case) is None:
        return law.body(case, run)
    return called(case, judged, law, case, run)


def judged(law: Law, case: Case, run: Run) -> None:
    """The body of a law, where the model may be called."""
    law.body(case, run)


def inspected(build: str, batch: str, loss: str, units: tuple[str, ...] | None, optimizer: str = "") -> inspection.Seen:
    """What is seen of a user's model. Raises what inspection.inspect raises."""
    process = _of((build, batch, loss, optimizer))
    found: inspection.Seen = process.call(_dotted(inspection.inspect), (build, batch, loss, units, optimizer))
    return found


@functools.lru_cache(maxsize=8)
def gives_classes(own: UserModelSpec) -> bool:
    """Whether the targets of a user's batch are integers."""
    form = _of(own.references).call(_dotted(loading.target_form), (own,))
    return form[1] is not None


def loaded() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Files and packages that the process of the newest model has loaded."""
    return (_process.files, _process.packages) if _process is not None else ({}, {})


class ModelProcess:
    """The process in which one user's model, batch, loss and optimizer are imported; another where it has ended."""

    def __init__(self, own: tuple[str, ...]) -> None:
        self.own = own
        """References to them, "" where there is none, as they were named last."""
        self.files: Mapping[str, str] = {}
        self.packages: Mapping[str, str] = {}
        self._remote = Remote(_SERVICE)
        self._broken: weakref.WeakValueDictionary[int, Violation] = weakref.WeakValueDictionary()

    @property
    def is_open(self) -> bool:
        return self._remote.is_open

    def call(self, function: str, arguments: tuple[Any, ...]) -> Any:
        """What it gives. Raises what it raises, and UsageError as ``called``."""
        run = next((one for one in arguments if isinstance(one, Run)), None)
        question = Call(function, tuple(map(_plain, arguments)), self.own, frozenset(self._broken))
        try:
            found = self._remote.ask(question, functools.partial(_served, run))
        except Died as death:
            raise self._error("ended its process, in which the single device computes", str(death)) from None
        if not isinstance(found, Returned):
            self.close()
            raise self._error("changed what answers in its process", f"an answer of {type(found).__name__}")
        self.files, self.packages = found.files, found.packages
        if found.changed:
            self.close()
            few, more = "; ".join(found.changed[:_NAMED]), len(found.changed) - _NAMED
            raise self._error(
                "changed what its answer is computed and judged with", few + f"; and {more} more" * (more > 0)
            )
        if found.broken is not None:
            raise self._violation(found.broken, run)
        return found.value

    def close(self) -> None:
        self._remote.close()

    def _violation(self, broken: Broken, run: Run | None) -> Violation:
        told = {name: getattr(broken, name) for name in ("what", "got", "wanted", "where", "despite")}
        if broken.number is None:
            return Violation(**told, cause=broken.cause)
        violation = Violation(**told, cause=functools.partial(self._causes, broken.number, run))
        self._broken[broken.number] = violation
        return violation

    def _causes(self, number: int, run: Run | None) -> Causes | None:
        """None where the process that knew of it has ended."""
        if not self.is_open:
            return None
        found: Causes | None = self.call(CAUSES, (number, run))
        return found

    def _error(self, what: str, got: str) -> UsageError:
        named = zip(("model", "batch", "loss", "optimizer"), self.own, strict=True)
        where = ", ".join(f"{what} {ref!r}" for what, ref in named if ref)
        wanted = "a model that leaves torch, fsdpcheck and its process as they are"
        then = "run it by itself on a few samples and take out what does this; no implementation is blamed for it"
        return UsageError(explain(f"your model {what}", got=got, wanted=wanted, where=where, then=then))


_process: ModelProcess | None = None


def _of(own: tuple[str, str, str, str]) -> ModelProcess:
    """The process of these; of another model than before there is another, for what one imports is not another's."""
    global _process
    known = tuple(references.canonical(ref) if ref else "" for ref in own)
    if _process is None or not _process.is_open or _homes(_process.own) != _homes(known):
        close()
        _process = ModelProcess(known)
    _process.own = known
    return _process


def _homes(refs: tuple[str, ...]) -> frozenset[str]:
    return frozenset(ref.rpartition(":")[0] for ref in refs if ref)


@atexit.register
def close() -> None:
    """End it."""
    global _process
    if _process is not None:
        _process.close()
    _process = None


def _plain(argument: Any) -> Any:
    if isinstance(argument, Run):
        return BoundRun(argument.engine.name, {name: getattr(argument, name) for name in _OF_A_RUN})
    return NamedLaw(argument.name, argument.source) if isinstance(argument, Law) else argument


_OF_A_RUN: Final = ("adapter_ref", "installs", "observe", "schedule", "avoid", "own", "too_wide", "memory")


def _served(run: Run | None, question: Any) -> object:
    """What the engine of ``run`` gives; an execution is noted as any of it."""
    assert run is not None
    assert isinstance(question, OfEngine)
    if question.method == "run":
        return replace(run.execute(*question.arguments), request=None)  # type: ignore[arg-type] # the other side has it
    return getattr(run.engine, question.method)(*question.arguments)


def _dotted(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"
