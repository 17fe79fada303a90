"""The process of a user's model: it imports the model, batch and loss, and calls functions of fsdpcheck that need them.

What judges here is looked at before the model is imported, and after each call: where the two differ, nothing that was
computed counts. Ranks, and what is noted of them, are with whoever asks (judging/model_process.py).
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

from fsdpcheck import process_state
from fsdpcheck.adapters.contract import Stored
from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.case import Case
from fsdpcheck.errors import UsageError
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.findings.cause import Causes
from fsdpcheck.findings.violation import Violation
from fsdpcheck.judging import registry
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.model_process import BoundRun, Broken, Call, NamedLaw, OfEngine, Returned
from fsdpcheck.judging.run import Run
from fsdpcheck.loading import provenance
from fsdpcheck.process_state.fingerprint import Fingerprint
from fsdpcheck.processes import messages
from fsdpcheck.processes.remote import Answer, Back

_JUDGES: Final = ("checks", "exact", "diagnosis", "oracle", "judging", "findings", "workload")
"""Packages that a law may come to import; all of them are, before a user's code is."""

_violations: dict[int, Violation] = {}
"""Those whose causes may be asked for, by number."""


def make(back: Back) -> Answer:
    """What answers each Call."""
    return _Service(back)


def causes(number: int, run: Run | None) -> Causes | None:
    """The causes of the violation ``number``."""
    return _violations[number].causes


class _Service:
    def __init__(self, back: Back) -> None:
        torch.set_num_threads(1)
        registry.chapters()
        _load(_JUDGES)
        process_state.state()
        self._loaded = provenance.Loaded()
        self._engines: dict[str, _OfTheOther] = {}
        self._back, self._number = back, 0
        self._before = Fingerprint()
        gc.freeze()  # the collector finds nothing among what was imported, and takes long to look there

    def __call__(self, call: Call) -> bytes:
        self._loaded.roots(call.own)
        for number in _violations.keys() - call.kept:
            del _violations[number]
        value = broken = None
        try:
            value = _function(call.function)(*map(self._here, call.arguments))
        except Violation as violation:
            broken = self._told(violation)
        except Exception:
            if not self._before.changed():
                raise
        changed = self._before.changed()
        return messages.dumps(Returned(value, broken, changed, self._loaded.files(), self._loaded.packages()))

    def _here(self, argument: Any) -> Any:
        if isinstance(argument, BoundRun):
            if argument.engine not in self._engines:
                self._engines[argument.engine] = _OfTheOther(argument.engine, self._back)
            return Run(self._engines[argument.engine], **argument.fields)
        return _law(argument) if isinstance(argument, NamedLaw) else argument

    def _told(self, violation: Violation) -> Broken:
        """As data; what looks for its causes stays here."""
        what, got, wanted, where = violation.what, violation.got, violation.wanted, violation.where
        if violation.diagnose is None:
            return Broken(what, got, wanted, where, violation.cause, violation.despite, None)
        self._number += 1
        _violations[self._number] = violation
        return Broken(what, got, wanted, where, "", violation.despite, self._number)


class _OfTheOther:
    """The engine of whoever asks: it runs there."""

    def __init__(self, name: str, back: Back) -> None:
        self.name, self.kind, self._back = name, name, back
        self._declared: dict[str, Declaration] = {}

    def run(self, request: RunRequest) -> Execution:
        execution: Execution = self._back(OfEngine("run", (request,)))
        execution.request = request
        return execution

    def declared(self, reference: str) -> Declaration:
        if reference not in self._declared:
            self._declared[reference] = self._back(OfEngine("declared", (reference,)))
        return self._declared[reference]

    def stored(self, reference: str, folder: str) -> list[Stored]:
        found: list[Stored] = self._back(OfEngine("stored", (reference, folder)))
        return found

    def read(self, reference: str, folder: str, case: Case) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._back(OfEngine("read", (reference, folder, case)))
        return found

    def settle(self) -> tuple[str, ...]:
        """Whoever asks settles it."""
        return ()

    def close(self) -> None:
        """Whoever asks closes it."""


def _load(rooms: Iterable[str]) -> None:
    for room in rooms:
        package = importlib.import_module(f"fsdpcheck.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)


def _law(named: NamedLaw) -> Law:
    if named.name not in registry.LAWS:
        registry.chapters([named.source])
    if named.name not in registry.LAWS:
        raise UsageError(f"{named.source} has no law {named.name!r} when imported; next: make it at the top of it")
    return registry.LAWS[named.name]


def _function(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)
