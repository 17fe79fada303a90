"""RunRequest and Execution: what an engine is asked for, and what one run gave back. Plain data; both pickle.

No module, DTensor or closure is ever in them: tensors, numbers, strings and tuples only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from fsdpcheck.adapters.contract import Observable, Use
from fsdpcheck.case import Case, TrainingCase
from fsdpcheck.errors import UsageError
from fsdpcheck.execution.releases import Release
from fsdpcheck.execution.trace import Trace
from fsdpcheck.execution.values import Raised, Unread, Value

FailureKind = Literal[
    "deadlock", "mismatch", "unsafe", "in-flight", "never waited for", "order", "raised", "exited", "lost",
    "no progress", "shared lock", "stream race", "freed in use", "adapter",
]  # fmt: skip
SchedulePolicy = Literal["forward", "reversed"]


Line = tuple[str, int, str]
"""(file, number, qualified name of the function)."""


@dataclass(frozen=True)
class RunRequest:
    """One run. Everything but ``case`` that decides it: who, with what planted, watched how, in which order.

    ``adapter``: a name, "pkg.mod:attr" or "file.py:attr". ``observe``: what to record beyond "params".
    ``probes``: dotted names "pkg.mod:function" of what looks at the run inside each rank (program.probe).
    ``installs``: dotted names "pkg.mod:attr" of context managers put in place inside each process for the run's length.
    ``instrument``: targets u of the instrument, float64 [steps, D, R], D the samples of the dataset (see
    oracle/certificate.py); None means zeros. ``schedule`` is the order in which simulated ranks get to run.
    """

    case: Case
    adapter: str
    observe: frozenset[Observable] = frozenset({"params"})
    probes: tuple[str, ...] = ()
    installs: tuple[str, ...] = ()
    instrument: Tensor | None = None
    clip_norm: float = float("inf")
    """C in the units of the losses, as the oracle derived it (Setup.clip_norm)."""
    schedule: SchedulePolicy = "forward"
    using: tuple[Use, ...] = ()
    """Features of FSDP2 that the training uses."""
    save_to: str = ""
    """Folder that all ranks reach: after step k (from 0) its checkpoint is saved there as "k". "" saves nothing."""
    load_from: str = ""
    """Folder of such checkpoints: each step k > 0 is taken by a new trainer, which has its state from "k - 1" there."""
    spoiled: tuple[tuple[int, float], ...] = ()
    """(global number of a sample, what its targets are instead, one of them in plain training: NaN or an infinity)."""
    loss_times: float = 1.0
    """What every per-sample loss is multiplied by, besides the case's own scale."""
    averages: bool = True
    """Whether gradients are averaged over the ranks, or only added up (ArithmeticRule.averaging)."""
    late: bool = False
    """Nothing is shown before the last step has been taken: not the initial parameters, nor those of other steps."""
    memory: str = "poison"
    """What new memory of the ranks holds before it is written: "poison" (engines/_common/poison.py) or "zeros".

    "noted" is poison, and the lines that ask for memory are recorded; "zeros at file:line" is poison but for that line.
    """
    lines: bool = False
    """Whether the lines of the implementation that run are recorded."""
    values: bool = False
    """Whether the numbers that pass through the functions of the implementation are recorded."""
    rate: float = 1.0
    """With which probability records are said to join a step (Setup.rate)."""
    records: int | None = None
    """Of a case of a sampler: how many records a data set has on which a training is built; None: draws are taken."""
    noise_seed: int | None = None
    """What seeds the noise (Setup.seed), where it is not the case's seed."""
    releases: tuple[tuple[Release, ...], ...] | None = None
    """Of each rank, what its optimizers are given in place of what they would be; () only notes what they are given."""

    @property
    def training(self) -> TrainingCase:
        """The case, of a run that trains. Raises UsageError for another."""
        if not isinstance(self.case, TrainingCase):
            kind = type(self.case).__name__
            raise UsageError(f"got a run of a {kind}, wanted one that trains; next: look at what its ranks observed")
        return self.case


@dataclass
class StepRecord:
    """What one rank showed after one step; a field is None when it was not asked for or not offered, and ``params`` is
    empty where a step is not looked at (RunRequest.late).

    ``params`` and ``grads``: full (unsharded) tensors by canonical name, params *before* any projection.
    ``norms`` and ``factors``: [local samples of this step], in the order of the rank's micro-batches.
    ``grad_norm``: the global gradient norm the implementation returned.
    ``hidden``: a parameter of which the rank's own whole copy differs from what it showed; "" when none does, or when
    what it holds is no whole copies.
    ``saved``: what was shown when the step's checkpoint was saved, after any projection; ``loaded``: what the trainer
    that takes this step showed when it had loaded the last step's.
    ``outputs``: what the trainer gave of the rank's first micro-batch when it was asked before the step.
    ``accounted``: what an accountant has been told (Observed.accounted).
    """

    params: dict[str, Tensor]
    grads: dict[str, Tensor] | None = None
    norms: Tensor | None = None
    factors: Tensor | None = None
    grad_norm: Tensor | None = None
    hidden: str = ""
    saved: dict[str, Tensor] | None = None
    loaded: dict[str, Tensor] | None = None
    outputs: Tensor | None = None
    accounted: list[tuple[float, float, int]] | None = None


@dataclass(frozen=True)
class Refused:
    """What a rank's optimizer updates there, ``before`` a step that raised over a spoiled sample and ``after``."""

    before: list[Tensor]
    after: list[Tensor]


@dataclass
class RankResult:
    """One rank's side of a run. ``observations`` are (probe, moment, step, value) in the order they were made.

    ``placement``: by parameter, its address in the last forward modulo 64 bytes; for real numbers only, since kernels
    take other paths and round otherwise at other alignments (see checks/shape_matched_replay.py). ``refused``: of a
    request with ``spoiled`` samples, where the step raised. ``allocations``: file:line of what asked for memory without
    values, ``lines``: what ran of the implementation, ``values``, ``unread`` and ``raised``: which numbers passed
    through it, which of them were not noted, and what was raised in it at last, ``releases``: what optimizers were
    given, where the request has these noted.
    ``calls_until_initial``: how much of ``trace`` had been issued when ``initial`` was shown.
    """

    rank: int
    initial: dict[str, Tensor] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    observations: list[tuple[str, str, int, Any]] = field(default_factory=list)
    trace: Trace = ()
    placement: dict[str, int] = field(default_factory=dict)
    refused: Refused | None = None
    allocations: list[str] = field(default_factory=list)
    lines: set[Line] = field(default_factory=set)
    values: list[Value] = field(default_factory=list)
    unread: Unread = field(default_factory=Unread)
    raised: Raised | None = None
    releases: list[Release] = field(default_factory=list)
    calls_until_initial: int = 0


@dataclass(frozen=True)
class RankState:
    """Where a rank stood when a run failed. ``waiting_for``: the collective it is blocked in, as text."""

    rank: int
    state: str
    waiting_for: str = ""
    where: str = ""
    """file:line of the innermost frame outside torch and fsdpcheck."""
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """Why a run did not complete: one failure however many ranks it touched.

    ``text`` is the whole report for people; ``ranks`` the same as data. ``seconds`` from the last possible move to the
    report (deadlocks only). ``exception``: type name of what a rank raised ("raised"), or the whole name of the error
    of ours that the run ends in ("adapter").
    """

    kind: FailureKind
    text: str
    ranks: tuple[RankState, ...] = ()
    exception: str = ""
    seconds: float | None = None


@dataclass
class Execution:
    """What one run gave back. ``failure`` is None when all ranks finished; then every rank has every step."""

    engine: str
    request: RunRequest
    ranks: list[RankResult]
    failure: Failure | None = None
    install_hits: dict[str, int] = field(default_factory=dict)
    """How often each install's patched code ran, summed over processes; 0 means the fault was ineffective."""
    voids: tuple[str, ...] = ()
    """Why this one schedule is no proof for all (store use after init, poll, wildcard, second group in flight)."""
    hand_overs: int = 0
    files: dict[str, str] = field(default_factory=dict)
    """What the processes of the ranks have loaded (see provenance.Loaded): path -> hash of its content."""
    packages: dict[str, str] = field(default_factory=dict)
    """The same of installed packages: name -> version."""
    left: tuple[str, ...] = ()
    """What ranks left changed of their process, a sentence each; it was put back (process_state)."""
    branches: frozenset[int] = frozenset()
    """Steps from line to line of the implementation that ran, by numbers of its process, where that is measured."""
    shared: tuple[str, ...] = ()
    """Names of what simulated ranks share of the implementation's modules, and write to; real ranks have it apiece."""
