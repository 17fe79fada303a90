"""A function on real ranks: a forked process each, gloo on the loopback, torchrun's environment; what came of it."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdpcheck.compat import groups_private
from fsdpcheck.engines._real import hangs, shared_table
from fsdpcheck.engines._real.forks import Forked, Said, Say
from fsdpcheck.errors import UsageError, excerpt, explain, qualified
from fsdpcheck.execution import Failure, FailureKind, deadlock
from fsdpcheck.execution.deadlock import Exited, Lost, Raised, Running, State
from fsdpcheck.execution.matching import ranks_text
from fsdpcheck.execution.outcomes import ending
from fsdpcheck.processes import leftovers
from fsdpcheck.simulation.globals import RankGlobals, unseeded

GAVE_UP: Final = ("Timed out waiting", "imed out after", "imeout after", "Timed out initializing", "monitoredBarrier")
"""What gloo and its stores say, in parts, when nobody has come for as long as they wait."""
_PEER_GONE: Final = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_NEXT: Final = "  next    run it on simulated ranks: they prove who waits for whom, and wait for no clock"
_OF_A_GPU: Final = ("in combination with fork-based", "in forked subprocess")
"""What torch says, in parts, in a process that was forked from one that has used a GPU or run a backward beside one."""
_HIDE_IT: Final = (
    "  next    hide the GPUs from this process, and with that from its ranks: CUDA_VISIBLE_DEVICES= pytest ..."
)
MOST_RANKS: Final = 64
_HOST: Final = "127.0.0.1"


@dataclass(frozen=True)
class RealRun:
    """What came of a function on real ranks. ``failure``: None if each returned; ``returned``: the values, by rank.

    ``printed``: what each rank wrote to stdout and stderr.
    """

    failure: Failure | None
    returned: tuple[Any, ...]
    printed: tuple[str, ...]


def run(
    program: Callable[..., Any],
    world_size: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seconds: float,
) -> RealRun:
    """Run ``program(*args, **kwargs)`` as each of ``world_size`` ranks, forked from this process.

    A hang in collectives and messages over gloo is proved, and told at once. ``seconds``: after how long gloo and its
    stores give up otherwise, where the program does not say. Then the failure is "no progress": that nobody came in
    time proves no deadlock. A rank that only computes is waited for as long as it does.
    Raises UsageError for a world size that is none, and where a fork would not be a rank.
    """
    _require(world_size)
    wanted = kwargs or {}
    with TemporaryDirectory(prefix=leftovers.folder_prefix()) as folder:
        table = Path(folder) / "table"
        shared_table.create(table, world_size)

        def live(rank: int, say: Say) -> None:
            hangs.publish(table, rank)
            if _tell(rank, lambda: program(*args, **wanted), say):
                _stay()

        with on_gloo(world_size, live, seconds) as ranks:
            watch = hangs.Watch(ranks, table, world_size)
            ranks.until_over(look=watch.look)
            failure = watch.failure or _failure(ranks, world_size, seconds) or watch.completed()
            printed = tuple(map(ranks.output, range(world_size)))
            watch.close()
    if failure is not None:
        return RealRun(failure, (), printed)
    return _with_values([ranks.said[rank].what for rank in range(world_size)], printed)


@contextmanager
def on_gloo(
    world_size: int,
    program: Callable[[int, Say], None],
    seconds: float | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Forked]:
    """Processes that run ``program(rank, say)`` as ranks of a gloo job, whose store is this process's.

    ``environment``: of each rank besides. No thread of the store is there yet when the ranks are forked.
    """
    listener = socket.create_server((_HOST, 0))
    own = {"MASTER_ADDR": _HOST, "MASTER_PORT": str(listener.getsockname()[1]), **_loopback(), **(environment or {})}

    def live(rank: int, say: Say) -> None:
        listener.close()
        _become(rank, world_size, own, seconds)
        program(rank, say)

    with listener, Forked({(rank,): partial(live, rank) for rank in range(world_size)}) as ranks:
        port = listener.getsockname()[1]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        store = c10d.TCPStore(_HOST, port, **options)
        yield ranks
    del store


def _become(rank: int, world_size: int, environment: Mapping[str, str], seconds: float | None) -> None:
    """Make this forked process the rank, as torchrun starts one: with its environment, and seeds of its own."""
    RankGlobals(world_size, unseeded()).enter(rank)
    os.environ.update({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    c10d.set_debug_level_from_env()
    groups_private.give_up_after(seconds)
    groups_private.join_together()


def _loopback() -> dict[str, str]:
    """Have gloo take the loopback, under the name that it has on this machine."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def _stay() -> None:
    """Keep the connections of a rank that has returned until it is ended with the others.

    Whoever waits for it would see a connection lost, sooner or later than it is proved that nobody comes.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    while True:
        signal.pause()


def _tell(rank: int, program: Callable[[], Any], say: Say) -> bool:
    """Run a rank's program and say how it ended: as simulated ranks do, ``sys.exit`` without a code ends it well.

    Whether it did.
    """
    value: Any = None
    try:
        value = program()
    except BaseException as error:
        state = ending(rank, error)
        if state != Exited(rank, 0):
            say(rank, Said("raised", state, fails=True))
            return False
    try:
        say(rank, Said("returned", (qualified(type(value)), pickle.dumps(value))))
    except Exception as error:
        say(rank, Said("unsendable", (qualified(type(value)), excerpt.said(error)), fails=True))
        return False
    return True


def _with_values(sent: Sequence[tuple[str, bytes]], printed: tuple[str, ...]) -> RealRun:
    values = []
    for rank, (kind, data) in enumerate(sent):
        try:
            values.append(pickle.loads(data))
        except Exception as error:
            return RealRun(_unsendable(rank, kind, excerpt.told(error).strip()), (), printed)
    return RealRun(None, tuple(values), printed)


def _unsendable(rank: int, kind: str, why: str) -> Failure:
    text = explain(
        f"what rank {rank} returned cannot be sent from its process",
        got=f"an object of {kind}: {why}",
        wanted="what pickle takes: numbers, texts, tensors, lists and dicts of them",
        then="return tensors (DTensor.full_tensor()) or plain data",
    )
    return Failure("adapter", text)


def _failure(ranks: Forked, world_size: int, seconds: float) -> Failure | None:
    """What went wrong first, with where the other ranks were by then; None if each has returned."""
    wrong = [rank for rank, said in ranks.said.items() if said.kind != "returned"]
    if not wrong:
        return None
    first = min(wrong, key=lambda rank: _order(ranks.said[rank]))
    if ranks.said[first].kind == "unsendable":
        return _unsendable(first, *ranks.said[first].what)
    silent, found = ranks.silent, ranks.stacks(ranks.silent)
    states: dict[int, State] = {rank: hangs.state_of(rank, said) for rank, said in ranks.said.items()}
    states |= {rank: Running(rank, found[rank].where, found[rank].lines) for rank in silent}
    kind, head, more = _told(states[first], seconds)
    lines = [head, *deadlock.rank_lines(states, {})]
    if silent:
        lines.append(f"  ended: {ranks_text(silent)}, which had not come to an end by then")
    in_order = tuple(states[rank] for rank in range(world_size))
    places = deadlock.rank_states(dict(enumerate(in_order)), {})
    return Failure(kind, "\n".join([*lines, *more]), places, getattr(states[first], "exception", ""))


def _next(text: str) -> list[str]:
    """What to do about an error with this text, where that is known."""
    known = ((_PEER_GONE, _NEXT), (_OF_A_GPU, _HIDE_IT))
    return [line for signs, line in known if any(words in text for words in signs)]


def _order(said: Said) -> tuple[bool, bool, int]:
    """What is first is taken for the cause: a lost process before others, and a lost connection after what lost it."""
    connection_lost = isinstance(said.what, Raised) and any(words in said.what.text for words in _PEER_GONE)
    return said.kind != "gone", connection_lost, said.moment


def _told(state: State, seconds: float) -> tuple[FailureKind, str, list[str]]:
    """The kind of failure that a rank's end is, its headline, and the lines that follow it."""
    match state:
        case Raised() if any(words in state.text for words in GAVE_UP):
            head = f"no progress: rank {state.rank} gave up; gloo waits {seconds:g} s unless the program says otherwise"
            return "no progress", head, [f"rank {state.rank} raised:\n{state.text.rstrip()}", _NEXT]
        case Raised():
            head = f"rank {state.rank} raised {state.exception or 'an exception'}"
            told = f"rank {state.rank} raised:\n{state.text.rstrip()}"
            return "raised", head, [told, *_next(state.text)]
        case Lost():
            return "lost", f"rank {state.rank} was lost: killed by {state.signal}", []
        case Exited():
            return "exited", f"rank {state.rank} left with exit code {state.code} in the middle of a run", []
    raise AssertionError(state)


def _require(world_size: int) -> None:
    if not 1 <= world_size <= MOST_RANKS:
        raise UsageError(explain("this is no number of real ranks", got=world_size, wanted=f"1 to {MOST_RANKS}"))
    if not hasattr(os, "fork"):
        raise UsageError(explain("real ranks are forked", got="a system without fork", then="run on simulated ranks"))
    if dist.is_initialized():
        got = "a default process group in this process, which ranks that are forked from it would have as well"
        then = "call destroy_process_group() before"
        raise UsageError(explain("this process is a rank already", got=got, then=then))
