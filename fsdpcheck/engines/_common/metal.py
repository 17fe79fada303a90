"""Metal: on what ranks compute, and over what real ones speak; whether this machine has it. Imports no torch by itself.

What a kind of ranks is called stands in one table, which engines, the command line and the fixture ``world`` read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from fsdpcheck.errors import UsageError, explain

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "cuda"]
Backend = Literal["memory", "gloo", "nccl"]


@dataclass(frozen=True)
class Metal:
    """``device``: where tensors of ranks lie. ``backend``: over what ranks speak; "memory" of simulated ones."""

    device: Device
    backend: Backend

    @property
    def words(self) -> str:
        """As a report names it; NCCL is on GPUs always."""
        return f"{self.backend}{' on GPUs' * (self.device == 'cuda' and self.backend != 'nccl')}"

    @property
    def really(self) -> str:
        """As a summary names it, with the GPU that was used."""
        if self.device == "cpu":
            return f"{'in' if self.backend == 'memory' else 'over'} {self.backend} on the processors"
        import torch

        gpus, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
        return f"{'in' if self.backend == 'memory' else 'over'} {self.backend} on {gpus} x {name}"

    def of_rank(self, number: int) -> torch.device:
        """Where the ``number``-th rank of this node computes: gloo's ranks may share a GPU, NCCL's have one each."""
        import torch

        if self.device == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", number if self.backend == "nccl" else number % torch.cuda.device_count())

    def lacks(self, ranks: int = 1) -> str:
        """Why a machine like this cannot have ``ranks`` such ranks, as a sentence; "" where it can."""
        if self.device == "cpu":
            return ""
        import torch
        import torch.distributed as dist

        if not torch.cuda.is_available():
            built = "built without CUDA" if torch.version.cuda is None else "which sees no CUDA device"
            return f"ranks on a GPU need one; this is torch {torch.__version__}, {built}"
        if self.backend == "nccl" and not dist.is_nccl_available():
            return f"NCCL is no part of this torch {torch.__version__}"
        if (gpus := self.most_ranks) is not None and ranks > gpus:
            return f"NCCL takes a GPU for each rank: {ranks} ranks, {gpus} GPU{'s' * (gpus != 1)}"
        return ""

    @property
    def most_ranks(self) -> int | None:
        """Of this node; None for any number."""
        import torch

        return torch.cuda.device_count() if self.backend == "nccl" else None


MEMORY: Final = Metal("cpu", "memory")
GLOO: Final = Metal("cpu", "gloo")


@dataclass(frozen=True)
class Kind:
    """``engine``: the module of ``fsdpcheck.engines`` that has such ranks."""

    engine: str
    metal: Metal


KINDS: Final[Mapping[str, Kind]] = {
    "simulated": Kind("simulated", MEMORY),
    "processes": Kind("processes", GLOO),
    "simulated-cuda": Kind("simulated", Metal("cuda", "memory")),
    "gloo-cuda": Kind("processes", Metal("cuda", "gloo")),
    "nccl": Kind("processes", Metal("cuda", "nccl")),
}
"""Kinds of ranks by name; "processes" are those of gloo on the processors."""
LAUNCHED: Final[Mapping[str, Metal]] = {
    "torchrun": GLOO,
    "torchrun-gloo-cuda": Metal("cuda", "gloo"),
    "torchrun-nccl": Metal("cuda", "nccl"),
}
"""Kinds of those that torchrun has started."""


def of(kind: str) -> Metal:
    """The metal of a kind of ranks."""
    return LAUNCHED[kind] if kind in LAUNCHED else KINDS[kind].metal


def is_simulated(kind: str) -> bool:
    """Whether these ranks are no processes."""
    return kind in KINDS and KINDS[kind].engine == "simulated"


def launched(metal: Metal) -> str:
    """The kind of ranks on this metal that torchrun has started."""
    return next(kind for kind, one in LAUNCHED.items() if one == metal)


def that_replays(kind: str) -> str:
    """The kind of ranks that runs the case of a finding again which those of ``kind`` have met.

    Simulated ones for a kind that nobody knows, and for one that this machine lacks.
    """
    metal = LAUNCHED.get(kind)
    again = next((name for name, one in KINDS.items() if one == Kind("processes", metal)), kind) if metal else kind
    return again if again in KINDS and not KINDS[again].metal.lacks() else "simulated"


def kind_of(engine: str, device: Device, backend: str | None) -> str:
    """The name of the kind that ``--engine``, ``--device`` and ``--backend`` (None: by the device) ask for.

    Raises UsageError for what goes not together.
    """
    wanted = _backend(engine, device, backend)
    found = [name for name, kind in KINDS.items() if kind == Kind(engine, Metal(device, wanted))]
    if found:
        return found[0]
    got = f"--engine {engine} --device {device} --backend {backend}"
    then = "leave --backend out: simulated ranks meet in memory" if engine == "simulated" else "say --device cuda"
    raise UsageError(explain("there are no such ranks", got=got, wanted="gloo, or NCCL on GPUs", then=then))


def _backend(engine: str, device: Device, backend: str | None) -> Any:
    if backend is not None:
        return backend
    return "memory" if engine == "simulated" else "nccl" if device == "cuda" else "gloo"


def require(metal: Metal, ranks: int = 1) -> None:
    """Raises UsageError where this machine has no such metal for so many ranks."""
    if lacks := metal.lacks(ranks):
        fewer = metal.device == "cuda" and metal.backend == "nccl" and not metal.lacks()
        then = "--backend gloo, whose ranks share a GPU, or fewer ranks" if fewer else "leave --device cuda out"
        raise UsageError(explain("these ranks cannot be had here", got=lacks, then=then))
