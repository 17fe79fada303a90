"""Process groups of torch.distributed: what a thread knows of them, and how ranks of one process get their own.

Tried: 2.13.0 unless a line says otherwise.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from fsdpcheck.compat.torch_private import replaced

STORE_SERVER = "pt_tcpstore_uv"
"""Name of the thread, as the system shows it, in which a TCPStore answers over sockets. Tried: 2.13.0."""


BACKEND = "fsdpcheck"
"""Name under which recorded process groups are registered with torch.distributed."""
OVER_GLOO = "fsdpcheck_gloo"
"""The same in a process that was forked from one in which ``BACKEND`` may stand for simulated ranks."""
OVER_NCCL = "fsdpcheck_nccl"
"""The same over NCCL."""


def group_identity(group: Any) -> tuple[str, tuple[int, ...]]:
    """(name, global ranks by their rank in the group) of a registered process group. Tried: 2.13.0.

    Ascending, except in a group made with ``sort_ranks=False``.
    """
    world = dist.distributed_c10d._world
    numbers = world.pg_group_ranks[group]
    return world.pg_names[group], tuple(sorted(numbers, key=numbers.__getitem__))


def devices() -> list[str]:
    """What recorded groups are registered for: a library may ask a backend for the device that it wants data on."""
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


class _ThreadLocalWorld(threading.local):
    """Each thread's record of its process groups; starts empty on every thread. Tried: 2.13.0.

    The fields are those of torch.testing's ``WorldData``, which its ``ThreadLocalWorld`` finds through a property each;
    c10d asks a dozen times a collective, and here an answer costs a tenth.
    """

    def __init__(self, enter: Callable[[], object]) -> None:
        enter()
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self._counted = [0]
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.comms: list[Any] = []

    @property
    def group_count(self) -> int:
        """How many groups this rank has made, whichever of its threads did."""
        return self._counted[0]

    @group_count.setter
    def group_count(self, count: int) -> None:
        self._counted[0] = count


def thread_local_world(enter: Callable[[], object]) -> object:
    """A stand-in for c10d's ``_world`` that gives each thread process groups of its own. Tried: 2.13.0.

    ``enter`` is called on each thread that asks for them, before it gets any, and may raise.
    """
    return _ThreadLocalWorld(enter)


@contextmanager
def isolated_threads(world: object) -> Iterator[None]:
    """While open, each thread sees its own process groups: in Python through ``world``, in C++ by isolation mode.

    Both are put back on leaving, so that other programs of this process see their own groups again. Tried: 2.13.0.
    """
    c10d: Any = torch._C._distributed_c10d
    module = dist.distributed_c10d
    before = module._world
    module._world = cast(Any, world)
    c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)
        module._world = before


@contextmanager
def groups_of_ranks(
    rank: Callable[[], int | None],
    meet: Callable[[str, int, int], tuple[Any, int, int]],
    making: Callable[[str, tuple[int, ...], str, frozenset[str]], object],
    in_turn: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    """While open, whatever backend and init_method a rank asks for, its process groups are those of ``BACKEND``.

    ``meet(url, rank, number of ranks)``, of which -1 stands for the usual, gives the store and both numbers.
    ``making(name, ranks, backend, names of those it has)`` hears of each group before a rank makes it, of no ranks
    for all. They have the name that was asked for. ``in_turn`` is given what makes a subgroup, its name included, for
    threads of one rank to make theirs one after another. A backend of torch would block the one thread that runs.
    "mpi", which is not built, and "fake", which reaches nobody, stay what they are. Tried: 2.13.0.
    """
    module: Any = dist.distributed_c10d
    make, rendezvous, set_timeout = module._new_process_group_helper, module.rendezvous, module._set_pg_timeout

    def make_ours(size: int, place: int, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        if rank() is None or backend in (dist.Backend.MPI, dist.Backend.FAKE):
            return make(size, place, ranks, backend, *args, **options)
        making(str(args[1]), tuple(ranks), str(backend), frozenset(map(str, module._world.pg_names.values())))
        group, store = make(size, place, ranks, dist.Backend(BACKEND), *args, **options)
        _named(group, backend)
        return group, store

    def meet_ours(url: str, own: int = -1, world_size: int = -1, **options: Any) -> Iterator[Any]:
        return rendezvous(url, own, world_size, **options) if rank() is None else iter([meet(url, own, world_size)])

    def set_ours(timeout: Any, group: Any = None) -> None:
        """Time-outs are nothing to ranks that know at once that nobody comes."""
        if rank() is None:
            set_timeout(timeout, group)

    with replaced(
        module,
        _new_process_group_helper=make_ours,
        _new_group_with_tag=in_turn(module._new_group_with_tag),
        rendezvous=meet_ours,
        _set_pg_timeout=set_ours,
    ):
        yield


def give_up_after(seconds: float | None) -> None:
    """From now on groups of gloo and their stores wait so long where a program does not say. Tried: 2.13.0.

    None: as long as torch has them wait.
    """
    if seconds is not None:
        module: Any = dist.distributed_c10d
        module.default_pg_timeout = timedelta(seconds=seconds)


def join_together() -> None:
    """From now on init_process_group of this process returns when all ranks have joined. Tried: 2.13.0.

    gloo fails to join a rank that is gone already; no program is about that.
    """
    module: Any = dist.distributed_c10d
    init = module.init_process_group

    @functools.wraps(init)
    def joined(*args: Any, **options: Any) -> None:
        init(*args, **options)
        group, store = module._get_default_group(), module._get_default_store()
        timeout = options.get("timeout") or module.default_pg_timeout
        module._store_based_barrier(group.rank(), store, "joined", group.size(), timeout)

    package: Any = dist
    for owner in (package, module):
        owner.init_process_group = joined


def announce_groups(making: Callable[[str, tuple[int, ...]], AbstractContextManager[object]]) -> None:
    """From now on ``making(name, ranks)`` is open while this process makes a group after the first. Tried: 2.13.0.

    Unless TORCH_DIST_INIT_BARRIER is 1, ranks that are no members make nothing and wait for nobody.
    """
    module: Any = dist.distributed_c10d
    make = module._new_process_group_helper

    @functools.wraps(make)
    def announced(size: int, place: Any, ranks: Any, *args: Any, **options: Any) -> Any:
        if not ranks or place is None:
            return make(size, place, ranks, *args, **options)
        with making(str(args[2]), tuple(ranks)):
            return make(size, place, ranks, *args, **options)

    module._new_process_group_helper = announced


def stand_in_for(
    backend: str, other: str, making: Callable[[str, tuple[int, ...]], AbstractContextManager[object]]
) -> None:
    """From now on groups that this process asks of ``backend`` are those of ``other``, by its name. Tried: 2.13.0.

    ``making(name, ranks)`` is open while one is made. Groups of other backends are made as they were. Who names none
    means gloo where there is no GPU.
    """
    unnamed = backend == dist.Backend.GLOO and not torch.cuda.is_available()
    meant = (backend, *((dist.Backend.UNDEFINED,) if unnamed else ()))
    module: Any = dist.distributed_c10d
    make = module._new_process_group_helper

    @functools.wraps(make)
    def ours(size: int, place: Any, ranks: Any, backend: Any, *args: Any, **options: Any) -> Any:
        if place is None or dist.Backend(backend or dist.Backend.UNDEFINED) not in meant:
            return make(size, place, ranks, backend, *args, **options)
        with making(str(args[1]), tuple(ranks) or tuple(range(size))):
            group, store = make(size, place, ranks, dist.Backend(other), *args, **options)
        _named(group, backend)
        return group, store

    module._new_process_group_helper = ours


def _named(group: Any, backend: Any) -> None:
    """Have whoever asks for the backend of a group of this rank hear what was asked for. Tried: 2.13.0."""
    world: Any = dist.distributed_c10d._world
    if group in world.pg_map:
        world.pg_map[group] = backend, world.pg_map[group][1]
        world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(backend))


def world_of_this_thread() -> dict[str, Any]:
    """What this thread, of which ``thread_local_world`` keeps it, knows of process groups. Tried: 2.13.0."""
    return dict(vars(dist.distributed_c10d._world))


@contextmanager
def in_world(known: dict[str, Any]) -> Iterator[None]:
    """While open, this thread knows the process groups that another one knew. Tried: 2.13.0."""
    c10d: Any = torch._C._distributed_c10d
    own = vars(dist.distributed_c10d._world)
    before, names = dict(own), dict(known["pg_names"])
    own.update(known)
    for group, name in names.items():
        c10d._register_process_group(name, group)
    try:
        yield
    finally:
        for name in names.values():
            c10d._unregister_process_group(name)
        own.clear()
        own.update(before)


def groups_of_this_thread() -> frozenset[Any]:
    """The process groups this rank knows now. Tried: 2.13.0."""
    return frozenset(dist.distributed_c10d._world.pg_map)


def calls_so_far() -> int:
    """How many collectives this rank has called in this run, on all of its groups that record."""
    return sum(int(getattr(group, "calls", 0)) for group in groups_of_this_thread())


def forget_groups_but(keep: frozenset[Any]) -> None:
    """Drop the groups that a case made, so that the next case of this rank finds the world as new. Tried: 2.13.0.

    Their names are counted from where they were, so that a case names its groups alike whenever it runs.
    """
    world = dist.distributed_c10d._world
    made = [group for group in world.pg_map if group not in keep]
    for group in made:
        if group in world.pg_map:  # with a default group all others are destroyed
            dist.destroy_process_group(group)
    whole = keep <= world.pg_map.keys()  # or the case has destroyed what it found, and the next one starts from nothing
    if made or not whole or world.group_count != len(keep):  # a rank that is no member counts too
        world.group_count = len(keep) if whole else 0


def asked_backend(group: Any) -> str:
    """The backend that a rank asked for when it made this group, which torch need not know. Tried: 2.13.0."""
    return str(dist.distributed_c10d._world.pg_map.get(group, (dist.Backend.GLOO,))[0])


def store_of_group(group: Any) -> Any:
    """The store by which a rank made this group; None where torch does not know it. Tried: 2.13.0."""
    return dist.distributed_c10d._world.pg_map.get(group, (None, None))[1]


def backend_on_cpu(group: Any) -> str:
    """Name of the backend by which such a group does what it is asked to do on a CPU. Tried: 2.13.0."""
    asked = asked_backend(group)
    return dist.distributed_c10d.BackendConfig(dist.Backend(asked)).get_device_backend_map().get("cpu", asked)
