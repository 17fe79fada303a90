"""The process of simulated ranks: it imports an implementation, says what that declares, and runs its requests.

Whoever judges is in another process and sends what is asked for here; both sides know only plain data.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from fsdpcheck import adapters, process_state
from fsdpcheck.compat import torch_private
from fsdpcheck.engines._common import imports, patches
from fsdpcheck.engines._simulated.coverage import Covered
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.engines._simulated.questions import (
    Close,
    Cover,
    Declare,
    Installs,
    Read,
    Require,
    Settings,
    Settle,
    Simulate,
    Stored,
)
from fsdpcheck.errors import AdapterError, NotPlain
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.loading import provenance
from fsdpcheck.loading.law_registry import laws
from fsdpcheck.processes import messages
from fsdpcheck.processes.remote import Answer, Back
from fsdpcheck.program import checkpoints

process_state.state()  # takes a quarter of a second: once, before processes are forked


def make(_: Back) -> Answer:
    """What answers all of these, with everything that is to be kept between them."""
    return _Service()


class _Service:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch_private.quiet_meta_kernels()
        self._loaded: provenance.Loaded | None = None
        self._covered: Covered | None = None
        self._engines: dict[Settings, InProcessEngine] = {}
        self._stack = ExitStack()
        self._stack.enter_context(process_state.undisturbed())

    def __call__(self, question: Any) -> bytes:
        match question:
            case Declare(reference):
                return self._declared(reference)
            case Simulate(request, settings):
                return self._simulated(request, settings)
            case Require(reference, installs):
                with process_state.undisturbed(False):
                    adapters.load(reference)
                patches.check(installs)
            case Installs(reference, module):
                with process_state.undisturbed(False):
                    adapters.load(reference)
                    return messages.dumps(patches.described(module))
            case Stored(reference, folder):
                return messages.dumps(checkpoints.stored(reference, folder))
            case Read(reference, folder, case):
                return messages.dumps(checkpoints.read(reference, folder, case))
            case Settle():
                return messages.dumps(process_state.sentences(process_state.settled()))
            case Cover(folder, reference, law):
                self._covered = self._covered or Covered(folder, reference)
                self._covered.counts_for(law)
            case Close(settings) if settings in self._engines:
                self._engines.pop(settings).close()
        return messages.dumps(None)

    def _declared(self, reference: str) -> bytes:
        loaded = self._sources(reference)
        with process_state.undisturbed(False):
            found = adapters.declared(reference)
        try:
            return messages.dumps(replace(found, laws=tuple(laws), files=loaded.files(), packages=loaded.packages()))
        except NotPlain as error:
            raise AdapterError(f"adapter {reference!r}: its name or features are no plain data: {error}") from error

    def _simulated(self, request: RunRequest, settings: Settings) -> bytes:
        loaded = self._sources(*imports.references(request), *request.installs)
        imports.patches(request)
        engine = self._engines.get(settings)
        if engine is None:
            engine = self._engines[settings] = InProcessEngine(
                settings.device, settings.budget_seconds, limit_seconds=settings.limit_seconds
            )
        execution = engine.run_in_pieces(request)
        execution.files, execution.packages = loaded.files(), loaded.packages()
        execution.branches = frozenset() if self._covered is None else self._covered.newest()
        execution.request = None  # type: ignore[assignment] # the other side has it
        try:
            return messages.dumps(execution)
        except NotPlain as error:
            raise AdapterError(f"{_place(execution)} is no plain data: {error}") from error

    def _sources(self, *references: str) -> provenance.Loaded:
        """What this process has loaded since before it imported anything of a user's."""
        self._loaded = self._loaded or provenance.Loaded()
        self._loaded.roots(references)
        return self._loaded


def _place(execution: Execution) -> str:
    """Which part of an execution does not travel, in words."""
    for result in execution.ranks:
        for name, value in vars(result).items():
            parts = list(enumerate(value)) if isinstance(value, list) else [("", value)]
            for number, part in parts:
                try:
                    messages.dumps(part)
                except NotPlain:
                    return f"what rank {result.rank} showed ({name} {number}".rstrip() + ")"
    return "what a run gave back"
