"""What a rank makes itself of torch's own, and what would block the thread that runs: stores, and gloo."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from fsdpcheck.compat.torch_private import replaced


@contextmanager
def stores_of_ranks(rank: Callable[[], int | None], at: Callable[[str], Any]) -> Iterator[None]:
    """While open, a TCPStore or FileStore that a rank makes is ``at(url)``, one for all ranks that name this place.

    It has the attributes that tell the place. Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """
    ports = iter(range(49152, 65536))

    class TCPStore(c10d.TCPStore):
        def __new__(cls, host_name: str, port: int, *args: Any, **options: Any) -> Any:
            if rank() is None:
                return real["TCPStore"](host_name, port, *args, **options)
            number = port or next(ports)  # 0: the store chooses, and tells the others itself
            store = at(f"tcp://{host_name}:{number}")
            store.host, store.port = host_name, number
            return store

    class FileStore(c10d.FileStore):
        def __new__(cls, file_name: str, *args: Any, **options: Any) -> Any:
            if rank() is None:
                return real["FileStore"](file_name, *args, **options)
            store = at(f"file://{os.path.realpath(file_name)}")
            store.path = file_name
            return store

    ours = {"TCPStore": TCPStore, "FileStore": FileStore}
    real = {name: getattr(c10d, name) for name in ours}
    with replaced(dist, **ours), replaced(c10d, **ours):
        yield


@contextmanager
def gloo_of_ranks(here: Callable[[], int | None], make: Callable[[int, int], Any]) -> Iterator[None]:
    """While open, a ProcessGroupGloo that a rank makes without torch.distributed is ``make(rank, size)``.

    Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """
    real: Any = c10d.ProcessGroupGloo

    class ProcessGroupGloo(real):  # type: ignore[misc]
        def __new__(cls, store: Any, rank: int, size: int, *args: Any, **options: Any) -> Any:
            return real(store, rank, size, *args, **options) if here() is None else make(rank, size)

    with ExitStack() as stack:
        for module in (dist, dist.distributed_c10d, c10d):
            stack.enter_context(replaced(module, ProcessGroupGloo=ProcessGroupGloo))
        yield


@contextmanager
def rpc_of_ranks(refuse: Callable[[], None]) -> Iterator[None]:
    """While open, ``refuse`` is called before torch.distributed.rpc starts; its agents block. Tried: 2.13.0."""
    rpc: Any = dist.rpc
    real = rpc.init_rpc

    def init_rpc(*args: Any, **options: Any) -> Any:
        refuse()
        return real(*args, **options)

    with replaced(rpc, init_rpc=init_rpc):
        yield
