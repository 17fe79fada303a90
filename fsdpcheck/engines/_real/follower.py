"""A follower: one process that is one real rank, and serves runs until its driver goes away."""

from __future__ import annotations

import faulthandler
import itertools
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d

from fsdpcheck import adapters, process_state
from fsdpcheck.compat import torch_private
from fsdpcheck.engines._common import imports, patches, poison
from fsdpcheck.engines._common.metal import GLOO, Metal
from fsdpcheck.engines._real import backends
from fsdpcheck.engines._real.groups import World
from fsdpcheck.engines._real.shared_table import Row
from fsdpcheck.engines._simulated.questions import Settle
from fsdpcheck.errors import AdapterError, NotPlain
from fsdpcheck.execution import Failure, RankResult, RunRequest, deadlock
from fsdpcheck.execution.outcomes import adapter_failure, ending
from fsdpcheck.loading import provenance
from fsdpcheck.processes import fork_server, messages
from fsdpcheck.program import rank_program
from fsdpcheck.simulation.globals import RankGlobals, module_global
from fsdpcheck.workload import numerics

STACK_SIGNAL = signal.SIGUSR1
"""On it a follower writes the stacks of its threads to its stack file, whatever it is doing."""


@dataclass
class Reply:
    """What a follower sends when its program has ended. ``adapter``: set when the adapter is at fault."""

    state: deadlock.State
    result: RankResult
    hits: dict[str, int] = field(default_factory=dict)
    adapter: Failure | None = None
    files: dict[str, str] = field(default_factory=dict)
    """See Execution.files."""
    packages: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    """What the rank left changed of its process, in words; it was put back."""
    imported: tuple[str, ...] = ()
    """What imports changed, in words; in place on the rank alone."""
    spent: bool = False
    """Whether something could not be put back, so that the process must run nothing more."""


@dataclass(frozen=True)
class Place:
    """Where a follower finds the others. ``folder`` holds the table and each rank's stack and stderr files.

    ``host``: where the store is. ``address``: where gloo of other ranks finds this one. ``on_node``: the number of this
    rank among those of its node; None where that is ``rank``.
    """

    rank: int
    world_size: int
    port: int
    folder: Path
    host: str = "127.0.0.1"
    address: str = "127.0.0.1"
    metal: Metal = GLOO
    on_node: int | None = None

    @property
    def device(self) -> torch.device:
        """Where the rank computes."""
        return self.metal.of_rank(self.rank if self.on_node is None else self.on_node)

    @property
    def table(self) -> Path:
        return self.folder / "table"

    @property
    def stack(self) -> Path:
        return self.folder / f"stack.{self.rank}"

    @property
    def stderr(self) -> Path:
        return self.folder / f"stderr.{self.rank}"


def serve(place: Place, pipe: Connection) -> None:
    """The whole life of a worker process: say "ready", then answer each request with a Reply."""
    os.setpgid(0, 0)  # what a rank forks is in its group, and ends with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's to handle: it ends its workers itself
    fork_server.follow_parent_into_death(place.folder)
    _keep_own_stderr(place)
    with place.stack.open("w") as stack_file:
        faulthandler.register(STACK_SIGNAL, stack_file, all_threads=False)
        store = c10d.TCPStore(place.host, place.port, is_master=False)
        row = Row(place.table, place.rank)
        device = place.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world = World(place.rank, place.world_size, store, row, backends.connecting(place.metal, device, place.address))
        pipe.send_bytes(b"ready")
        with process_state.undisturbed():
            _answer(pipe, world, device)


def _answer(pipe: Connection, world: World, device: torch.device) -> None:
    """Answer each request with a Reply, and each Settle with what was left that no run has compared."""
    loaded: provenance.Loaded | None = None
    runs = itertools.count(1)
    while True:
        message = messages.loads(pipe.recv_bytes())
        if isinstance(message, Settle):
            pipe.send_bytes(messages.dumps(tuple(process_state.settled())))
            continue
        loaded = loaded or provenance.Loaded([message.adapter, *message.installs])
        reply = follow(message, next(runs), world, device)
        reply.files, reply.packages = loaded.files(), loaded.packages()
        pipe.send_bytes(_sent(reply))


def _sent(reply: Reply) -> bytes:
    """The reply as a message; where what a rank shows is no plain data, that is the adapter's fault."""
    try:
        return messages.dumps(reply)
    except NotPlain as error:
        rank = reply.result.rank
        fault = AdapterError(f"what rank {rank} showed is no plain data: {error}")
        reply.result, reply.state, reply.adapter = RankResult(rank), ending(rank, fault), adapter_failure(rank, fault)
        return messages.dumps(reply)


def follow(request: RunRequest, run: int, world: World, device: torch.device) -> Reply:
    """Be one rank of one run, on ``device``. Never raises for what the program does."""
    rank = world.rank
    reply = Reply(deadlock.Finished(rank), RankResult(rank))
    torch.set_num_threads(1)
    torch_private.quiet_meta_kernels()
    try:
        with ExitStack() as stack:
            stack.enter_context(numerics.switched(request.case))
            kept = stack.enter_context(process_state.Kept(imports.patches(request)))
            stack.enter_context(poison.of_ranks(request.memory))
            own = RankGlobals(
                world.size, [module_global(name) for name in adapters.features(request.adapter).rank_local]
            )
            stack.callback(own.restore)
            own.enter(rank)
            stack.enter_context(numerics.of(request.case))
            hits = stack.enter_context(patches.installed(request.installs))
            stack.callback(lambda: reply.hits.update(hits.read()))
            stack.callback(world.close)
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            world.open(run)
            with kept.on_rank(rank):
                rank_program(request, rank, device, reply.result)
    except BaseException as error:
        reply.state, reply.adapter = ending(rank, error), adapter_failure(rank, error)
    else:
        reply.left, reply.imported, reply.spent = tuple(kept.left), imports.told(request), kept.spent
    return reply


def _keep_own_stderr(place: Place) -> None:
    """Last words (gloo's abort message, Python's fatal errors) go to a file that the driver quotes."""
    descriptor = os.open(place.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 2)
    os.close(descriptor)
