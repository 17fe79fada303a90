"""Real ranks under torchrun, on one node or several: gloo on the processors or on GPUs, or NCCL.

Rank 0 hosts the driver. Every torchrun process, rank 0 too, keeps worker processes that are its rank and that it
replaces after a failure; so a rank that hangs or dies takes neither torchrun nor the driver along. Cases may have fewer
ranks than torchrun started: then the first so many have workers. What driver and keepers tell one another travels
through torchrun's own store.
"""

from __future__ import annotations

import atexit
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from fsdpcheck.adapters.declaration import Declaration
from fsdpcheck.engines._common import hosts
from fsdpcheck.engines._common import metal as metals
from fsdpcheck.engines._common.metal import GLOO, Metal
from fsdpcheck.engines._real import keeper, launch, monitor, post
from fsdpcheck.engines._real.contact import Contact
from fsdpcheck.engines._real.follower import Place
from fsdpcheck.engines._real.launch import is_under_torchrun, rank, world_size
from fsdpcheck.engines._real.lifeline import Lifelines
from fsdpcheck.engines._real.pool import Pool, settled
from fsdpcheck.engines._real.remote_workers import FarLink, KeptLink
from fsdpcheck.engines._real.transport import Link, LocalLink
from fsdpcheck.engines.base import TORCHRUN
from fsdpcheck.errors import FsdpcheckError, NotSupported, OtherWorldSize, UsageError, explain
from fsdpcheck.execution import Execution, RunRequest
from fsdpcheck.processes import messages
from fsdpcheck.processes.limit import Limit

__all__ = ["Ranks", "TorchrunEngine", "is_under_torchrun", "rank", "world_size"]

_POOLS: Final = 3
"""Pools of different numbers of ranks that are kept; each has a worker of some 200 MB on each of its ranks."""
_LOOK_SECONDS: Final = 0.01
_START_SECONDS: Final = 600.0
"""How long rank 0 waits for the processes of other ranks: as long as torchrun's own rendezvous waits for its nodes."""


class Ranks:
    """The processes that torchrun started, as each of them sees them. One object in each.

    Rank 0 drives with ``engine`` and ends all with ``leave``; every other one does what is asked in ``serve``.
    """

    def __init__(self) -> None:
        if not is_under_torchrun():
            what, then = "this process is no rank of torchrun", "torchrun --nproc-per-node N -m fsdpcheck"
            raise UsageError(explain(what, got="no TORCHELASTIC_RUN_ID", wanted="to be started by torchrun", then=then))
        self._store: Any = launch.control_store()
        self.hello = launch.hello()
        self.served = keeper.Served()
        self._came = self._left = False
        self._known: tuple[launch.Hello, ...] = ()
        self.contact: Contact | None = None
        """In rank 0, once there was an engine: with whom there is contact."""

    def come(self, trouble: str = "") -> None:
        """Say that this rank is there, or what keeps it from taking part."""
        if not self._came:
            self._came, self.hello = True, launch.hello(trouble)
            post.give(self._store, f"hello {self.hello.rank}", messages.dumps(self.hello))

    def engine(self, budget_seconds: float | None = None, metal: Metal = GLOO) -> TorchrunEngine:
        """In rank 0: what runs cases on ``metal``. Waits until all ranks have come.

        Raises UsageError for ranks that are unlike, and for nodes with fewer GPUs than they need.
        """
        self.come()
        self._known = self._everybody()
        _require_alike(self._known)
        _require_gpus(self._known, metal)
        store = post.DriversStore(self._store)
        far = not launch.is_on_one_node()
        self.contact = Contact(
            store, self._known, lifelines=Lifelines(self._store, launch.store_host()) if far else None
        )
        return TorchrunEngine(store, self._known, self.contact, budget_seconds, metal)

    @property
    def known(self) -> tuple[launch.Hello, ...]:
        """What all ranks have said of themselves, in their order; () before there was an engine."""
        return self._known

    def serve(self) -> int:
        """In every other rank, which has come: keep workers until rank 0 says leave; returns the code to leave with."""
        is_near = self.hello.node == launch.DRIVERS_NODE
        return keeper.serve(self._store, self._said(0).pid if is_near else None, self.served)

    def leave(self, code: int) -> None:
        """In rank 0, once: have all others leave with ``code``."""
        if not self._left:
            self._left = True
            self.come()
            office = post.Office(self._store, world_size())
            for other in range(1, world_size()):
                office.send_last(other, post.Leave(code))

    def _everybody(self, patience: float = _START_SECONDS) -> tuple[launch.Hello, ...]:
        """What all say of themselves; they have come when torchrun has started them, or torchrun ends this process."""
        missing, until = set(range(world_size())), time.monotonic() + patience
        then = "see what they wrote above"
        try:
            while missing and time.monotonic() < until:
                missing -= {other for other in missing if self._store.check([f"hello {other}"])}
                time.sleep(_LOOK_SECONDS if missing else 0)
            what = f"ranks did not start within {patience:.0f} s"
        except KeyboardInterrupt:
            what = "ranks did not start before torchrun ended the job"
        if missing:
            who = ", ".join(map(str, sorted(missing)))
            raise UsageError(explain(what, got=f"nothing of rank {who}", wanted="all ranks", then=then))
        return tuple(map(self._said, range(world_size())))

    def _said(self, other: int) -> launch.Hello:
        count = int(self._store.get(f"hello {other}"))  # waits for it
        pieces = (bytes(self._store.get(f"hello {other}/{number}")) for number in range(count))
        said: launch.Hello = messages.loads(b"".join(pieces))
        return said


class TorchrunEngine(hosts.Hosted):
    """The driver, in rank 0: runs requests of at most as many ranks as torchrun started.

    ``budget_seconds``, ``metal``: see ProcessesEngine.
    """

    name = TORCHRUN

    def __init__(
        self,
        store: Any,
        known: tuple[launch.Hello, ...],
        contact: Contact,
        budget_seconds: float | None = None,
        metal: Metal = GLOO,
    ) -> None:
        self.metal, self.kind = metal, metals.launched(metal)
        self._known, self._contact, self._budget, self._limit = known, contact, budget_seconds, Limit()
        self._office = post.Office(store, len(known))
        self._pools: dict[int, Pool] = {}
        self._made, self.processor_seconds = 0, 0.0
        """``processor_seconds``: of rank 0's own workers."""
        atexit.register(self.close)

    def declared(self, reference: str) -> Declaration:
        """See engines/base.py. Who takes more ranks than there are is said to take as many."""
        return hosts.at_most(super().declared(reference), len(self._known))

    def run(self, request: RunRequest) -> Execution:
        """Run ``request`` on torchrun's first ranks. Raises OtherWorldSize when it needs more than there are."""
        size = request.case.world_size
        if size > len(self._known):
            raise OtherWorldSize(
                f"this case needs more ranks than torchrun started\n  got     a case of world size {size}\n"
                f"  wanted  at most {len(self._known)}\n"
                f"  next    torchrun --nproc-per-node {size}, or --engine processes",
                len(self._known),
            )
        if self._contact.lost():  # of a node that this case may not need, and others do
            raise KeyboardInterrupt
        hosts.declared(request.adapter)
        hosts.require(request.adapter, request.installs)
        pool = self._pool(size)
        _require_shared_folder(pool, request)
        try:
            execution = monitor.run(pool, self.name, request, self._budget, self._limit)
        except BaseException:
            self._discard(size)
            raise
        if execution.failure is not None and self._contact.is_over():
            raise KeyboardInterrupt  # as torchrun is about to say: it ends the job without one of its processes
        if execution.failure is not None or pool.spent:
            self._discard(size)
        return execution

    def settle(self) -> tuple[str, ...]:
        """See engines/base.py."""
        return settled(self._pools, self._discard)

    def close(self) -> None:
        """End the workers."""
        for size in list(self._pools):
            self._discard(size)

    def _pool(self, size: int) -> Pool:
        """The workers of so many ranks; those used last are kept."""
        pool = self._pools.pop(size, None)
        while pool is None and len(self._pools) >= _POOLS:
            self._discard(next(iter(self._pools)))
        self._pools[size] = pool or self._new_pool(size)
        return self._pools[size]

    def _new_pool(self, size: int) -> Pool:
        self._made += 1
        try:
            return Pool(size, partial(self._link, self._made), launch.store_host())
        except FsdpcheckError:
            if self._contact.is_over():
                raise KeyboardInterrupt from None
            raise

    def _link(self, number: int, place: Place) -> Link:
        place = replace(place, metal=self.metal)
        if place.rank == 0:
            return LocalLink(replace(place, address=launch.own_address(), on_node=launch.on_node()))
        there = self._known[place.rank]
        near = there.node == self._known[0].node
        start, why_gone = post.Start(number, place, self._known[0].node), partial(self._contact.why_gone, place.rank)
        return (KeptLink if near else FarLink)(self._office, place.rank, start, why_gone)

    def _discard(self, size: int) -> None:
        pool = self._pools.pop(size, None)
        if pool is not None:
            self.processor_seconds += pool.links[0].processor_seconds()
            pool.close()


def _require_alike(known: tuple[launch.Hello, ...]) -> None:
    """Raises UsageError where a rank is in trouble, or ranks have other versions of what computes."""
    if troubled := [one for one in known if one.trouble]:
        raise UsageError("\n".join(f"rank {one.rank} on {one.host}: {one.trouble}" for one in troubled))
    first = known[0].versions
    for name, version in first.items():
        others = [f"rank {one.rank} {one.versions.get(name)} on {one.host}" for one in known]
        if any(one.versions.get(name) != version for one in known):
            what, then = f"ranks have different versions of {name}", "install one on all nodes"
            raise UsageError(explain(what, got=", ".join(others), wanted=f"{version} on all", then=then))


def _require_gpus(known: tuple[launch.Hello, ...], metal: Metal) -> None:
    """Raises UsageError where a node has fewer GPUs than ranks on it need: one, or over NCCL one each."""
    if metal.device == "cpu":
        return
    metals.require(metal)  # of this node, whose torch says why
    for node in dict.fromkeys(one.node for one in known):
        there = [one for one in known if one.node == node]
        gpus, wanted = there[0].gpus, len(there) if metal.backend == "nccl" else 1
        if gpus < wanted:
            got = f"{gpus} GPU{'s' * (gpus != 1)} for {len(there)} ranks on {there[0].host}"
            then = "--nproc-per-node of as many as there are GPUs, or --backend gloo, whose ranks share them"
            raise UsageError(explain("a node has too few GPUs", got=got, wanted=f"at least {wanted}", then=then))


def _require_shared_folder(pool: Pool, request: RunRequest) -> None:
    """Raises NotSupported for a checkpoint between nodes that share no temporary folder."""
    blind = [rank for rank, link in pool.table.far.items() if not link.sees]
    if (request.save_to or request.load_from) and blind:
        what = "a checkpoint is read by ranks of several nodes, which share no temporary folder"
        then = "set TMPDIR, on all nodes, to a folder that they share"
        got = f"{tempfile.gettempdir()} of rank 0, which rank {blind[0]} does not see"
        raise NotSupported(explain(what, got=got, wanted="one folder", then=then))


def no_more_signals() -> None:
    """From now on this process leaves with its own code, whatever torchrun sends when another has left before it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):  # of a thread that is not the program's
            signal.signal(number, signal.SIG_IGN)
