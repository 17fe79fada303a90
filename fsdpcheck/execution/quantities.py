"""What passes in a step where the harness sees it without a word from an adapter. Plain data.

K micro-batches, b samples of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

QuantityKind = Literal["parameter", "samples", "local gradient", "gradient", "options", "updated"]


@dataclass(frozen=True)
class Quantity:
    """One value that one rank had at one place of a step.

    "parameter": as the forward of a module of its own reads it. "samples": the targets [b, F + R] that arrive at the
    loss. "local gradient": what one backward gives for a parameter as the forward read it. "gradient": what the
    optimizer reads; "updated": the parameter when it has stepped. Of both ``value`` is a tensor, a Shown of ranks that
    have pieces of it, or None for no gradient. "options": option -> (as it is, as it was made), of those
    of an optimizer that are not as they were made.

    ``name``: the parameter's canonical name, or "". ``micro_batch``: how many the loss was called for before, in this
    step. ``calls``: how many collectives the rank had called in all. ``lines``: "file:line function" of the innermost
    frames of an implementation.
    """

    kind: QuantityKind
    name: str
    micro_batch: int
    value: Any
    calls: int
    lines: tuple[str, ...]
