"""The machine and the packages that a session finds, in rows of text. Imports neither torch nor hypothesis."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from fsdpcheck.processes import leftovers, zygote

TRIED: Final = {
    "torch": "2.13.0", "hypothesis": "6.170.17", "numpy": "2.4.6", "networkx": "3.6.1", "rich": "15.0.0",
    "pytest": "9.2.0", "triton": "3.6.0",
}  # fmt: skip
"""Package -> the release that the tests were last run with; constraints.txt has those that matter to a verdict."""
_OTHERS: Final = ("pytest", "triton", "accelerate", "deepspeed", "lightning-fabric", "opacus", "torchtitan")
_PYTHON: Final = (3, 11)


@dataclass(frozen=True)
class Fact:
    """One row: what was looked at, what was found, and what to do about it, "" where nothing needs doing."""

    name: str
    found: str
    mend: str = ""


def packages() -> Iterator[Fact]:
    """What is installed of what fsdpcheck needs, and of what its adapters need, with the releases that were tried."""
    asked = _asked()
    yield Fact("python", f"{platform.python_version()} (tried: 3.11)")
    for name in dict.fromkeys((*TRIED, *_OTHERS)):
        wanted = asked.get(name, "")
        words = "; ".join(
            filter(None, (f"tried: {TRIED[name]}" if name in TRIED else "", f"asked for: {wanted}" * bool(wanted)))
        )
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            needed = name in TRIED and name not in _OTHERS
            yield Fact(name, "not installed" + f" ({words})" * bool(words), f"pip install {name}" if needed else "")
            continue
        yield Fact(name, f"{found}" + f" ({words})" * bool(words), _outside(name, found, wanted))


def _asked() -> dict[str, str]:
    """Package -> the releases that fsdpcheck asks for; nothing in a checkout that is not installed."""
    try:
        lines = metadata.requires("fsdpcheck") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9_.-]+)\s*([<>=!~][^;]*)?", line) for line in lines)
    return {one[1]: (one[2] or "").strip() for one in found if one is not None}


def _outside(name: str, found: str, wanted: str) -> str:
    """What to do where ``found`` is not in a range such as ">=2.11,<2.14"; "" where it is."""
    here = _numbers(found)
    for bound in filter(None, wanted.split(",")):
        at_least = re.fullmatch(r">=\s*([\d.]+)", bound.strip())
        below = re.fullmatch(r"<\s*([\d.]+)", bound.strip())
        if (at_least and here < _numbers(at_least[1])) or (below and here >= _numbers(below[1])):
            return f"pip install '{name}{wanted}'"
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


def machine() -> Iterator[Fact]:
    """What of the system decides how fast, and whether, sessions run."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Fact("system", f"{platform.system()} {platform.machine()}, {cores} usable core{'s' * (cores > 1)}")
    yield Fact("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "") or "not set")
    yield Fact("processes", _forks())
    folder = tempfile.gettempdir()
    is_writable = os.access(folder, os.W_OK)
    yield Fact("temporary files", folder, "" if is_writable else "set TMPDIR to a folder that can be written")


def _forks() -> str:
    """How processes are had here."""
    if not hasattr(os, "fork"):
        return "started anew: this system has no fork, so each imports torch again"
    if not leftovers.can_adopt():
        return "started anew: orphans cannot be adopted here, so each imports torch again"
    return "forked from one that has imported torch" if zygote.ready() is not None else "started anew"
