"""What DTensor and DeviceMesh keep private: whose a mesh is, and what is known of operators on sharded tensors."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from fsdpcheck.compat.torch_private import replaced


def forget_meshes() -> None:
    """Forget what DTensor remembers on this thread. To be called after groups of a device mesh were destroyed.

    A thread does so before it ends, too: what is kept in it of C++ is let go of when Python can no longer be asked.
    It gives its results the mesh of the first call like theirs, equal to the asked mesh but perhaps from an earlier
    case; a mesh finds its groups by name, and those names are gone or, worse, another group's. Tried: 2.13.0.
    """
    # What torch.distributed.tensor.debug._clear_sharding_prop_cache does; importing that module fails where the
    # interpreter is about to end, as threads that were never closed do.
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor._api"), "DTensor", None)
    if kind is not None:
        kind._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        cast(Any, torch._C)._clear_DTensor_sharding_propagator_cache()


class _Propagation:
    """What one rank found out of an operator on sharded tensors, for the ranks that ask the same on equal meshes.

    Which placements an operator gives, and what it wants its inputs to be, is a function of the operator, its arguments
    and the mesh, not of the rank that asks: DTensor finds it out on each rank of a process apart, in 5 ms each time,
    more than half of what a rank of ``fully_shard`` computes. Each rank gets an answer of its own, with its own mesh.
    Not shared is what may depend on the rank (arguments rewritten to a local shape), what a tracer asks, and what
    names more than one mesh. Groups are no part of it, so it is known for later runs too. Tried: 2.13.0.
    """

    _MOST = 4096

    def __init__(self) -> None:
        self._layouts: dict[Any, tuple[Any, ...]] = {}
        self._meshes: dict[Any, Any] = {}
        self._known: dict[Any, Any] = {}

    def forget(self) -> None:
        """Nothing is known any more: another program may have rules of its own."""
        self._layouts.clear()
        self._meshes.clear()
        self._known.clear()

    def bound(self) -> None:
        """Forget all if it is much; called between runs."""
        if len(self._known) > self._MOST:
            self.forget()

    @contextmanager
    def shared(self, may_share: Callable[[], bool]) -> Iterator[None]:
        """While open, ranks share what they find out, where ``may_share()``."""
        kind: Any = getattr(sys.modules.get("torch.distributed.tensor._sharding_prop"), "ShardingPropagator", None)
        name = "propagate_op_sharding_non_cached"
        find_out = getattr(kind, name, None)
        if find_out is None:  # DTensor is not loaded, or a release that does not call it so
            yield
            return

        def ours(propagator: Any, asked: Any) -> Any:
            mesh = _mesh_of(asked) if may_share() else None
            if mesh is None:
                return find_out(propagator, asked)
            first = self._meshes.setdefault(self._layout(mesh), mesh)
            question = _on(first, asked)
            if question not in self._known:
                answer = find_out(propagator, asked)
                if not answer.use_val_from_redistribute_schema:
                    self._known[question] = _on(first, answer)
                return answer
            return _on(mesh, self._known[question])

        with replaced(kind, **{name: functools.wraps(find_out)(ours)}):
            yield

    def _layout(self, mesh: Any) -> tuple[Any, ...]:
        """What equal meshes of all ranks have in common; found out once for those of a rank, which takes 0.1 ms."""
        if mesh not in self._layouts:
            ranks = mesh.mesh
            placed = tuple(ranks.shape), tuple(ranks.flatten().tolist())
            self._layouts[mesh] = mesh.device_type, mesh.mesh_dim_names, *placed
        return self._layouts[mesh]


def _mesh_of(asked: Any) -> Any:
    """The one mesh that all DTensors of an operator's arguments are on; None where there are several, or none."""
    meshes = {id(spec.mesh): spec.mesh for spec in _specs((asked.args_schema, asked.kwargs_schema))}
    return next(iter(meshes.values())) if len(meshes) == 1 else None


def _specs(value: Any) -> Iterator[Any]:
    if type(value).__name__ == "DTensorSpec":
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _specs(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _specs(inner)


def _on(mesh: Any, value: Any) -> Any:
    """A copy of an operator's question or answer in which every DTensor is on ``mesh``."""
    kind = type(value).__name__
    if kind == "DTensorSpec":
        made = copy.copy(value)
        made.mesh = mesh  # its hash is computed anew
        return made
    if kind == "OpSchema":
        return type(value)(value.op, _on(mesh, value.args_schema), _on(mesh, value.kwargs_schema), value.schema_info)
    if kind == "OutputSharding":
        made = copy.copy(value)
        made.__dict__.pop("mesh", None)  # a cached property
        made.output_spec = _on(mesh, value.output_spec)
        made.redistribute_schema = _on(mesh, value.redistribute_schema)
        return made
    if isinstance(value, dict):
        return {name: _on(mesh, inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on(mesh, inner) for inner in value)
    return value


@dataclass
class _MeshesOfRank:
    """Of one rank: the state that equal meshes share, by mesh; those of this run; whether two may be mixed up."""

    program: str
    thread: int
    states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    of_this_run: set[Any] = field(default_factory=set)
    unclear: bool = False
    runs: int = 0

    def take(self, mesh: Any) -> None:
        """Have ``mesh``, which is new, share its state with those of earlier runs that equal it."""
        known, root = self.states.setdefault(mesh, vars(mesh)), getattr(mesh, "_root_mesh", None)
        slices_alike = root is not None and root is known.get("_root_mesh")
        if self.thread != threading.get_ident() or (mesh in self.of_this_run and not slices_alike):
            self.unclear = True
        elif known is not vars(mesh):
            state = dict(vars(mesh))
            known.clear()
            known.update(state)
            mesh.__dict__ = known
        self.of_this_run.add(mesh)


class Meshes:
    """Device meshes of the ranks of one process, run by run: those of a rank equal that rank's only, and live on.

    DTensor keeps what it knows of operators, and plans, by the hash of a mesh; some of it depends on where the rank is
    in the mesh (what is left of an uneven shard). torch tells the meshes of threads apart only for a backend called
    "threaded", by ``_thread_id``; here it is the rank, so that equal meshes of later runs stay equal, also those sent
    from another rank.

    Results get the mesh of the first call like theirs, which is perhaps of an earlier run, whose groups are gone and
    whose names are other groups'. To forget it all after each run makes an implementation learn again what the one
    before it learned of the same cases (1.9 s of training.plain instead of 1.0, measured of reference_fsdp2 behind
    fully_shard); so equal meshes of one rank share one state, that of the newest. Where two of one run are equal and
    may differ in their groups, a thread of the rank made one, or one was sent, that rank forgets after the run instead.
    So it does before another program, which may have rules for operators of its own, and after ``_RUNS``, for nothing
    else bounds what is kept. What ranks share of operators (_Propagation) is forgotten before another program alone, or
    where it is much. Tried: 2.13.0.
    """

    _RUNS = 100

    def __init__(self, rank: Callable[[], int | None]) -> None:
        self._rank = rank
        self._of: dict[int, _MeshesOfRank] = {}
        self._propagation = _Propagation()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, a mesh made where ``rank()`` is a number belongs to that rank."""
        from torch.distributed.device_mesh import DeviceMesh

        kind: Any = DeviceMesh

        def made(mesh: Any, *args: Any, **kwargs: Any) -> None:
            make(mesh, *args, **kwargs)
            if (of := self._belonging(mesh)) is not None:
                of.take(mesh)

        def sent(mesh: Any, *args: Any, **kwargs: Any) -> None:
            get(mesh, *args, **kwargs)
            if (of := self._belonging(mesh)) is not None:
                of.unclear = True

        make, get = kind.__init__, kind.__setstate__
        with (
            replaced(kind, __init__=functools.wraps(make)(made), __setstate__=functools.wraps(get)(sent)),
            self._propagation.shared(self._may_share),
        ):
            yield

    def begin(self, rank: int, program: str) -> None:
        """A run begins, in which ``program`` may have rules of its own; called on the rank's own thread."""
        of = self._of.setdefault(rank, _MeshesOfRank(program, threading.get_ident()))
        if of.program != program:
            self._propagation.forget()
            self._forget(rank, program)

    def end(self, rank: int) -> None:
        """The run has ended and its groups are gone; called on the same thread."""
        of = self._of[rank]
        of.runs += bool(of.of_this_run)
        of.of_this_run.clear()
        self._propagation.bound()
        if of.unclear or of.runs >= self._RUNS:
            self._forget(rank, of.program)

    def _may_share(self) -> bool:
        """Whether the rank that this is runs code of ours alone, on its own thread, and traces nothing."""
        of = self._of.get(-1 if (rank := self._rank()) is None else rank)
        return of is not None and not of.program and of.thread == threading.get_ident() and not _is_tracing()

    def _belonging(self, mesh: Any) -> _MeshesOfRank | None:
        """Make ``mesh`` that of the rank that this is; what is known of the rank's meshes. None where this is none."""
        rank = self._rank()
        if rank is None:
            return None
        mesh._thread_id, mesh._hash = rank, None
        return self._of[rank]

    def _forget(self, rank: int, program: str) -> None:
        forget_meshes()
        self._of[rank] = _MeshesOfRank(program, threading.get_ident())


def _is_tracing() -> bool:
    tracing = getattr(sys.modules.get("torch.distributed._functional_collectives"), "_are_we_tracing", None)
    return tracing is None or bool(tracing())
