"""What torch.compile must leave alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdpcheck.compat.torch_private import replaced

_left: set[str] = set()


@contextmanager
def compiled_without(*packages: str) -> Iterator[None]:
    """While open, whoever compiles leaves the functions of these packages as they are, wherever they are called.

    They stay as they are afterwards. The compiler takes a second to import, so it is told when it is first asked for.
    Tried: 2.13.0; read in 2.11.0 and 2.12.0.
    """

    def leave_alone() -> None:
        from torch._dynamo import trace_rules

        for package in set(packages) - _left:
            _left.add(package)
            trace_rules.add(package)

    compiles: Callable[..., Any] = torch.compile

    @functools.wraps(compiles)
    def ours(*args: Any, **options: Any) -> Any:
        leave_alone()
        return compiles(*args, **options)

    if "torch._dynamo" in sys.modules:
        leave_alone()
    with replaced(torch, compile=ours):
        yield
