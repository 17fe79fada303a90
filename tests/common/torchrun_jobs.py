"""A job of torchrun with one agent or several on this machine, whose processes a test stops, ends and reads."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from fsdpcheck.processes import leftovers
from tests.common.commands import TOY, TOYS, environment
from tests.common.network_namespaces import Machine

LASTING: Final = (
    *("-m", "fsdpcheck", "run", "--adapter", TOY, "--laws", str(TOYS / "lasting.py"), "--law", "lasting.*"),
    *("--world-size", "2", "--no-confirm", "--json", "out.json", "--rank-files", "ranks"),
)
"""A session that has found something, ``FOUND``, and then goes on for ever."""
FOUND: Final = "lasting.first: finding"


class Agent:
    """One agent, with the ranks of a node."""

    def __init__(
        self,
        folder: Path,
        node: int,
        words: Sequence[str],
        path: Path | None = None,
        machine: Machine | None = None,
    ) -> None:
        """``path``: a folder whose modules go before all others. ``machine``: where it runs; None for this one."""
        inside = machine.inside if machine is not None else ()
        variables = environment() | {"PYTHONUNBUFFERED": "1"}
        if path is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(path), variables["PYTHONPATH"]])
        self._err = folder / f"err{node}"
        self._out = folder / f"out{node}"
        with self._err.open("w") as err, self._out.open("w") as out:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "torch.distributed.run", *words],
                cwd=folder,
                env=variables,
                stdout=out,
                stderr=err,
            )

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    def until(self, said: str) -> None:
        """Wait until it has written this."""
        while said not in self.err:
            with suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"it ended with {self.process.wait(0.1)}: {self.out}{self.err}")

    def descendants(self) -> list[int]:
        """Its processes, itself first."""
        living, found = list(leftovers.living()), [self.process.pid]
        for pid in found:
            found += [one.pid for one in living if one.parent == pid]
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send it to the agent and to all its processes."""
        for pid in self.descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> None:
        """Kill what is left of it."""
        self.signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def job(
    folder: Path,
    *words: str,
    nodes: int = 1,
    per_node: int = 2,
    port: int = 0,
    path: Path | None = None,
    machines: Sequence[Machine] = (),
) -> Iterator[list[Agent]]:
    """The agents, one for each node, of a job that runs ``words`` of torchrun; killed at the end, if they are there.

    ``machines``: where each runs, if not all run on this one.
    """
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    agents = []
    try:
        for node in range(nodes):
            where = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(per_node)]
            where += ["--master-addr", machines[0].address if machines else "127.0.0.1", "--master-port", str(port)]
            agents.append(Agent(folder, node, [*where, *words], path, machines[node] if machines else None))
        yield agents
    finally:
        for agent in agents:
            agent.end()


def rank_files(folder: Path) -> dict[int, Any]:
    """The exit code that each rank wrote of itself."""
    read = (json.loads(path.read_text()) for path in sorted(folder.glob("ranks/rank*.json")))
    return {one["rank"]: one["exit_code"] for one in read}


def rank_process(agent: Agent, rank: int) -> int:
    """The process that torchrun started as this rank."""
    own = [one.pid for one in leftovers.living() if one.parent == agent.process.pid]
    return next(pid for pid in own if f"\0RANK={rank}\0".encode() in b"\0" + leftovers.environment(pid))
