"""What torchrun says of this process, and what its ranks say of themselves before anything else."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from fsdpcheck import __version__

_NEVER = timedelta(days=30)
LOOPBACK = "127.0.0.1"
DRIVERS_NODE = 0
"""The node of rank 0, which torchrun's store is on as well: ranks are numbered node by node."""


def is_under_torchrun() -> bool:
    """Whether torchrun (torch.distributed.run) started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size() -> int:
    """How many processes torchrun started, on all nodes."""
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    """Which of them this is."""
    return int(os.environ["RANK"])


def on_node() -> int:
    """Which of the processes of its node this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def node() -> int:
    """The number of the node that this process is on."""
    return int(os.environ.get("GROUP_RANK", "0"))


def is_on_one_node() -> bool:
    """Whether all ranks are on one machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world_size()


def store_host() -> str:
    """Where ranks reach the node of rank 0."""
    return LOOPBACK if is_on_one_node() else os.environ["MASTER_ADDR"]


def own_address() -> str:
    """Where other ranks reach this node: the address from which it reaches the node of rank 0."""
    if is_on_one_node():
        return LOOPBACK
    family, _, _, _, there = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent: the system chooses a way
        probe.connect(there)
        return str(probe.getsockname()[0])


def control_store() -> Any:
    """torchrun's store. Typed loosely: the stubs deny that a store takes bytes."""
    store: Any = next(rendezvous("env://"))[0]
    store.set_timeout(_NEVER)
    return c10d.PrefixStore("fsdpcheck", store)


def versions() -> dict[str, str]:
    """What has to be the same on all ranks: name -> version."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"fsdpcheck": __version__, "torch": str(torch.__version__), "python": python}


@dataclass(frozen=True)
class Hello:
    """What the process of one rank says of itself."""

    rank: int
    node: int
    host: str
    pid: int
    gpus: int
    versions: dict[str, str] = field(default_factory=dict)
    trouble: str = ""
    """What keeps it from taking part; "" where nothing does."""


def hello(trouble: str = "") -> Hello:
    """This process's."""
    return Hello(rank(), node(), platform.node(), os.getpid(), torch.cuda.device_count(), versions(), trouble)
