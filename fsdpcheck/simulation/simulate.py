"""Simulate: any torch.distributed program on simulated ranks of this process, and what came of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from fsdpcheck import process_state
from fsdpcheck.compat import dispatch_private
from fsdpcheck.errors import FsdpcheckError, UsageError, explain
from fsdpcheck.execution import Failure, SchedulePolicy
from fsdpcheck.execution.orders import Demand, ring_in_order_of_issue
from fsdpcheck.execution.trace import Collective, Times, Trace
from fsdpcheck.processes.limit import Limit
from fsdpcheck.simulation.current_rank import current_rank
from fsdpcheck.simulation.decisions import Decisions
from fsdpcheck.simulation.globals import unseeded
from fsdpcheck.simulation.identity import copies_seen
from fsdpcheck.simulation.programs import shared_objects as shared_by_ranks
from fsdpcheck.simulation.programs.logs import RankLoggers
from fsdpcheck.simulation.programs.modules import RankModules
from fsdpcheck.simulation.programs.no_gpu import NoGpu
from fsdpcheck.simulation.programs.process import RankProcesses
from fsdpcheck.simulation.programs.script import Runnable
from fsdpcheck.simulation.programs.shared_objects import SharedByProgram
from fsdpcheck.simulation.programs.streams import Printed
from fsdpcheck.simulation.run import SimulatedRun, World
from fsdpcheck.simulation.single_rank import steps_noted
from fsdpcheck.simulation.streams import ON_HOST, OnGpu
from fsdpcheck.simulation.tensor_shapes import ShapesAlone
from fsdpcheck.simulation.threads import Pool

if TYPE_CHECKING:
    from fsdpcheck.simulation.programs.cuda import CudaAsCpu

MOST_RANKS: Final = 256


class SimulationFailed(FsdpcheckError):
    """Ranks of a simulation did not all come to their end; ``failure`` says why."""

    exit_code = 1

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


@dataclass(frozen=True)
class Simulation:
    """What came of a program on ``world_size`` simulated ranks.

    ``failure``: None when every rank came to its end, else why not: one failure, however many ranks it touched.
    ``returned``: what each rank's program returned; None for a rank that did not. ``printed``: what each rank wrote to
    stdout and stderr. ``traces``: every rank's collectives in its order; ``times``: when each was issued and waited
    for. ``voids``: why this one order of ranks is no proof for all. ``left``: what ranks left changed of their process,
    a sentence each; it was put back.
    """

    world_size: int
    failure: Failure | None
    returned: tuple[Any, ...]
    printed: tuple[str, ...]
    traces: tuple[Trace, ...]
    times: tuple[Times, ...]
    voids: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    hand_overs: int = 0
    shared: tuple[str, ...] = ()
    """What ranks share and real ranks do not, a sentence each: what one of them wrote to, and a user's C code."""
    out_of_order: tuple[Demand, ...] = ()
    """Calls on groups of NCCL in orders that are a ring for devices which run one call after another; () for none."""
    notes: tuple[str, ...] = ()
    """What is no failure and should be looked at: threads and groups that are left behind."""
    substitutions: tuple[tuple[str, int], ...] = ()
    """What of a GPU was played on the CPU, and how often, by name."""
    asked_for_gpu: str = ""
    """Where the program asked whether there is a GPU, and was told that there is none."""
    files_left: tuple[str, ...] = ()
    """Files that ranks wrote and read, and that are still there."""
    payloads: tuple[int, ...] = ()
    """Of a rank alone: how many bytes each of its calls is about, in all."""
    steps: tuple[int, ...] = ()
    """Of a rank alone: how many calls it had made when the optimizer that stepped first had stepped, each time."""
    made_up: tuple[tuple[str, int], ...] = ()
    """Of tensors without values: the lines for which one was made up, and how often."""

    def check(self) -> Simulation:
        """Itself. Raises SimulationFailed, with the report, unless every rank came to its end."""
        if self.failure is not None:
            raise SimulationFailed(self.failure)
        return self


@dataclass(frozen=True)
class Options:
    """How a program is simulated.

    ``schedule``: the order in which ranks get to run. ``per_node``: ranks of one node, as LOCAL_WORLD_SIZE says; 0 for
    all. ``budget``: seconds after which a rank that still computes is "no progress"; None for no such limit. ``show``:
    whether what ranks print is printed, the rank before each line. ``cuda_as_cpu``: play GPUs on the CPU, one a rank of
    a node (programs/cuda.py). ``own``: installed packages that each rank imports for itself, as it does a user's
    modules; of Python alone. ``alone_of``: one rank runs, as the first of so many (single_rank.py); 0 for all.
    ``without_values``: of tensors there are shapes alone (simulation/tensor_shapes.py). ``on_gpu``: ranks share a real
    GPU, on a stream each (simulation/streams.py).
    """

    schedule: SchedulePolicy = "forward"
    per_node: int = 0
    budget: float | None = None
    show: bool = True
    decisions: Decisions | None = None
    cuda_as_cpu: bool = False
    own: tuple[str, ...] = ()
    alone_of: int = 0
    without_values: bool = False
    on_gpu: bool = False


def simulate(
    program: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    schedule: SchedulePolicy = "forward",
    per_node: int = 0,
    budget: float | None = None,
    show: bool = True,
    cuda_as_cpu: bool = False,
    own: Sequence[str] = (),
) -> Simulation:
    """Run ``program(*args, **kwargs)`` on ``world_size`` simulated ranks, as torchrun would start it.

    Each rank has the environment of torchrun, its own random generators, settings, working directory and exit
    handlers, and its own copy of each module that lies outside site-packages and is imported while the ranks run. What
    was imported before, the module of ``program`` for one, and arguments they share: what one of them writes to there
    is told (``shared``, simulation/shared_state.py) and voids. ``init_process_group`` is the program's own, with any
    backend. Exactly one rank runs at a time, so the run repeats bit for bit, and a deadlock is known when no rank can
    move, without any time-out.

    Guarantee: the failure, if there is one, happens under the legal schedule that was run. None proves that it happens
    under no schedule only where ``voids`` is empty.

    ``args``, ``kwargs``: the same objects for every rank. For the others see ``Options``.
    Raises UsageError for a world size that is none, and inside a simulated rank.
    """
    wanted = kwargs or {}
    options = Options(schedule, per_node, budget, show, cuda_as_cpu=cuda_as_cpu, own=tuple(own))
    return simulated(program, world_size, args, wanted, options)


def simulated(
    program: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
) -> Simulation:
    """``simulate``, with its options as one."""
    roots = shared_by_ranks.roots(program, args, kwargs)
    modules = RankModules(current_rank, own=options.own)
    return _simulated(lambda: program(*args, **kwargs), world_size, options, modules, roots)


def simulate_script(script: Runnable, world_size: int, options: Options) -> Simulation:
    """The same for a script: each rank runs it as its ``__main__``."""
    return _simulated(script.run, world_size, options, RankModules(current_rank, script.main, options.own))


@dataclass
class _Ranks:
    """What ranks have given back so far."""

    returned: dict[int, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)


def _simulated(
    program: Callable[[], Any],
    world_size: int,
    options: Options,
    modules: RankModules,
    roots: Mapping[str, Any] | None = None,
) -> Simulation:
    """``roots``: objects that all ranks share, by what they are told as."""
    _require(world_size, options)
    shared = SharedByProgram(roots or {}) if world_size > 1 else None
    ranks, printed, processes = _Ranks(), Printed(options.show), RankProcesses(world_size)
    kept = process_state.Kept((), world_size)
    gpus, loggers = _gpus(options.alone_of or world_size, options), RankLoggers()
    shapes = ShapesAlone() if options.without_values else None
    streams = OnGpu() if options.on_gpu else ON_HOST

    def on_rank(rank: int) -> None:
        with ExitStack() as stack:
            stack.enter_context(kept.on_rank(rank))
            if rank in run.watches:
                stack.enter_context(run.watches[rank].until_the_end())
            stack.enter_context(run.names[rank].told())
            if options.alone_of:
                stack.enter_context(steps_noted(ranks.steps, run.traces[rank]))
            if shapes is not None:
                stack.enter_context(shapes.in_place(run.names[rank].forget))
            ranks.returned[rank] = processes.run(rank, lambda: gpus.run(program))

    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        stack.enter_context(kept)
        stack.enter_context(printed.in_place())
        stack.enter_context(modules.in_place())
        stack.enter_context(processes.in_place())
        stack.enter_context(gpus.in_place())
        stack.enter_context(loggers.in_place())
        pool = Pool(world_size, pinned=False, told=options.alone_of)
        stack.callback(pool.close)
        apart = (*unseeded(), *modules.swaps, loggers.swap)
        world = World(
            world_size,
            options.schedule,
            apart=apart,
            foreign_code="any",
            joined=False,
            per_node=options.per_node,
            watched=True,
            around=streams.of_rank if options.on_gpu else gpus.on_thread,
            streams=streams,
            memory=None if isinstance(gpus, NoGpu) or options.alone_of else gpus.memory,
            alone_of=options.alone_of,
        )
        looked = None if shared is None else shared.look
        run = SimulatedRun(world, looked, options.decisions)
        stack.enter_context(dispatch_private.within_each_backward(partial(_backward, run)))
        stack.enter_context(copies_seen(lambda: run.names.get(-1 if (rank := current_rank()) is None else rank)))
        if world_size > 1:
            stack.enter_context(run.files.looked_at())
        pool.run(run, on_rank, options.budget, Limit(float("inf")))
        if shared is not None:
            shared.end()
    traces = tuple(tuple(run.traces[rank]) for rank in range(world_size))
    return Simulation(
        world_size,
        run.failure,
        tuple(ranks.returned.get(rank) for rank in range(world_size)),
        tuple(printed.of(rank) for rank in range(world_size)),
        traces,
        tuple(tuple(tuple(moments) for moments in run.times[rank]) for rank in range(world_size)),
        tuple(sorted({*run.voids, *(shared.voids if shared else ())})),
        process_state.sentences(kept.left, world_size),
        run.baton.hand_overs,
        tuple(shared.sentences(modules.extensions)) if shared else (),
        ring_in_order_of_issue(_of_groups(run.like_nccl, traces)),
        (*run.notes, *_not_ended(run)),
        tuple(sorted(gpus.counts.items())),
        gpus.asked,
        tuple(run.files.left),
        tuple(run.payloads),
        tuple(ranks.steps),
        tuple(shapes.asked.items()) if shapes is not None else (),
    )


def _not_ended(run: SimulatedRun) -> Iterator[str]:
    """Threads that are no daemons, and that ranks left running."""
    for sentence in process_state.sentences(run.lasting, run.world.size):
        yield f"leak: {sentence}, and a process does not end before its threads have"


@contextmanager
def _backward(run: SimulatedRun) -> Iterator[None]:
    """While open, a backward runs on this thread."""
    rank = current_rank()
    memory = None if rank is None else run.memories.get(rank)
    if memory is not None:
        memory.timelines.begin_backward()
    try:
        yield
    finally:
        if rank is not None and rank in run.watches:
            run.watches[rank].take_its_place()
        if memory is not None:
            memory.timelines.end_backward()


def _of_groups(names: set[str], traces: Sequence[Trace]) -> dict[int, list[Collective]]:
    return {rank: [call for call in trace if call.group_name in names] for rank, trace in enumerate(traces)}


def _gpus(world_size: int, options: Options) -> CudaAsCpu | NoGpu:
    if not options.cuda_as_cpu:
        return NoGpu()
    from fsdpcheck.simulation.programs.cuda import CudaAsCpu  # imports FSDP, which takes long

    return CudaAsCpu(current_rank, options.per_node or world_size)


def _require(world_size: int, options: Options) -> None:
    if current_rank() is not None:
        raise UsageError("a simulated rank cannot start another simulated run")
    if not 1 <= world_size <= MOST_RANKS:
        raise UsageError(
            explain(
                "this is no number of ranks", got=world_size, wanted=f"1 to {MOST_RANKS}", then="give another number"
            )
        )
    told = options.alone_of or world_size
    if options.per_node and told % options.per_node:
        got = f"{told} ranks on nodes of {options.per_node}"
        raise UsageError(explain("ranks do not fill their nodes", got=got, wanted="as many on each node"))


@contextmanager
def _one_thread() -> Iterator[None]:
    """While open, torch computes with one thread, as it does under torchrun unless the environment says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
