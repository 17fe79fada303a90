"""Two machines as far as a network can tell: two namespaces of Linux, joined by one link that a test takes away."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

NEEDED = ("ip", "nsenter", "unshare")


@dataclass(frozen=True)
class Machine:
    """A namespace. ``pid``: the process that holds it. ``link``: its end, with this ``address``."""

    pid: int
    link: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Words before a command that is to run there."""
        return "nsenter", "-t", str(self.pid), "-U", "-n", "--preserve-credentials"

    def ip(self, *words: str) -> None:
        """Run ip(8) there. Raises CalledProcessError."""
        subprocess.run([*self.inside, "ip", *words], check=True, capture_output=True)

    def cut_off(self) -> None:
        """From now on nothing reaches it, and nothing that it sends arrives, not even the end of a connection."""
        self.ip("link", "set", self.link, "down")


def why_not() -> str:
    """Why no namespaces can be made here; "" where they can."""
    lacking = [name for name in NEEDED if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)} on this machine"
    tried = subprocess.run(["unshare", "-rn", "true"], check=False, capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Both, each with its own loopback and one end of the link; gone at the end with all that is set in them."""
    held: list[subprocess.Popen[str]] = []
    try:
        held.append(_held(["unshare", "-rn"]))
        one = Machine(held[0].pid, "one", "10.77.0.1")
        held.append(_held(["nsenter", "-t", str(one.pid), "-U", "--preserve-credentials", "unshare", "-n"]))
        other = Machine(held[1].pid, "other", "10.77.0.2")
        one.ip("link", "add", one.link, "type", "veth", "peer", "name", other.link, "netns", str(other.pid))
        for machine in (one, other):
            machine.ip("addr", "add", f"{machine.address}/24", "dev", machine.link)
            for link in ("lo", machine.link):
                machine.ip("link", "set", link, "up")
        yield one, other
    finally:
        for holder in held:
            with suppress(ProcessLookupError):
                holder.kill()
            holder.communicate()


def _held(way: Sequence[str]) -> subprocess.Popen[str]:
    """A process in a namespace of its own, that does nothing until it is ended."""
    holder = subprocess.Popen(
        [*way, "sh", "-c", "echo made; read never"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "made\n", f"{' '.join(way)} made no namespace"
    return holder
