"""Poison: on ranks, memory that nobody has written holds what no right step can use, so reading it is seen.

Two layers, each in place for the length of a run, in the process of the ranks and never where a case is judged:

* ``torch.empty`` and its kin return NaN, integers their largest value. PyTorch does so under deterministic algorithms,
  which are therefore on, but told about only to C++: Python is answered as if the program alone had set them, and goes
  the ways that it goes without us. They warn and never raise, unless the program asks for that (on CPUs ``put_`` and
  ``max_unpool`` have no deterministic form), and warnings of ranks are ignored, unless the program makes them errors.
  A program that switches them off, or the fill, keeps the fill.
* All memory that c10's allocator for CPUs hands out is filled with ``torch_private.JUNK``: what ``storage.resize_``
  gives back or C++ allocates. NaN as float32, but 1.67e308 as float64, so this layer alone would miss a product with
  zero.

Not filled: memory of numpy or of ``malloc``; on GPUs the second layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdpcheck.compat import torch_private


@dataclass
class _Asked:
    """What the program believes to have set. Ranks have it apiece: it is swapped like every other setting."""

    deterministic: bool
    warn_only: bool
    fill: bool


@contextmanager
def of_ranks(memory: str) -> Iterator[None]:
    """New memory is filled as ``memory`` of a request says until this is left; then everything is as it was."""
    native: dict[str, Any] = {name: getattr(torch._C, name) for name in torch_private.DETERMINISTIC}
    get, warns, put, fills, fill = native.values()
    before = _Asked(get(), warns(), fills())
    asked, poison = replace(before), memory != "zeros"
    flags = torch_private.allocator_fills()
    kept = [flag.value for flag in flags or ()]
    for flag, value in zip(flags or (), (poison, not poison), strict=False):
        flag.value = value

    def effective() -> None:
        put(poison or asked.deterministic, warn_only=asked.warn_only or not asked.deterministic)
        fill(poison)

    for name, planted in _answering(asked, effective).items():
        setattr(torch._C, name, planted)
    effective()
    try:
        yield
    finally:
        for name, original in native.items():
            setattr(torch._C, name, original)
        put(before.deterministic, warn_only=before.warn_only)
        fill(before.fill)
        for flag, value in zip(flags or (), kept, strict=True):
            flag.value = value


def _answering(asked: _Asked, effective: Callable[[], None]) -> dict[str, Callable[..., Any]]:
    """By name, functions in place of ``torch._C``'s: they note what the program asks for, and answer with it."""

    def put(mode: bool, *, warn_only: bool = False) -> None:
        asked.deterministic, asked.warn_only = mode, warn_only
        effective()

    def fill(mode: bool) -> None:
        asked.fill = mode

    answers = (lambda: asked.deterministic, lambda: asked.warn_only, put, lambda: asked.fill, fill)
    return dict(zip(torch_private.DETERMINISTIC, answers, strict=True))
