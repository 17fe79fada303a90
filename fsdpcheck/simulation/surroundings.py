"""What ranks reach each other by besides communication and files: sockets, pipes, processes, locks of files.

Its order is neither searched nor known, so that a program which uses it is not proved: each is a void. What torch uses
for itself (the workers of a DataLoader, compilers) is not looked at, but for a pipe that two ranks use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

from fsdpcheck.compat import frames_private
from fsdpcheck.compat.torch_private import replaced
from fsdpcheck.simulation.current_rank import here

_PROCESS: Final = "a rank started another process"
_SOCKET: Final = "a rank used a socket"
_LOCKED: Final = "a rank locked a file"
_PIPE: Final = "ranks shared a pipe"
EVENTS: Final = {
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn", "os.fork", "os.forkpty"), _PROCESS),
    **dict.fromkeys(("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"), _SOCKET),
    **dict.fromkeys(("fcntl.flock", "fcntl.lockf"), _LOCKED),
}
"""Python's audit event -> what is said of a rank that causes it."""


def said_of(event: str) -> str:
    """The void of an event on this thread, which a rank causes; "" if it is none, or torch's own doing."""
    said = EVENTS.get(event, "")
    return said if said and frames_private.is_asked_by_a_program(sys._getframe(1)) else ""


@contextmanager
def pipes_of_ranks(voids: set[str]) -> Iterator[None]:
    """While open, a pipe of multiprocessing that two ranks use is a void."""
    home: Any = Connection
    send, receive = home._send, home._recv
    users: dict[int, int] = {}

    def used(connection: Any) -> None:
        rank = here.number
        if rank is not None and users.setdefault(id(connection), rank) != rank:
            voids.add(_PIPE)

    def send_ours(connection: Any, *args: Any) -> Any:
        used(connection)
        return send(connection, *args)

    def receive_ours(connection: Any, *args: Any) -> Any:
        used(connection)
        return receive(connection, *args)

    with replaced(home, _send=send_ours, _recv=receive_ours):
        yield
