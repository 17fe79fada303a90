"""Randomness, and what else may make a script depend on the number of ranks: reported with file:line, not judged.

A random mask that one rank draws, ranks that each have a part of the batch cannot draw: dropout is off. Other draws
inside a forward, the statistics of a batch and branches on values are noted.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType
from typing import Any, Final

from fsdpcheck.comparison.precision.notes import note
from fsdpcheck.comparison.precision.operators import Operator
from fsdpcheck.comparison.precision.tables import DRAW
from fsdpcheck.compat import frames_private, torch_private

_STATISTICS: Final = (
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_batch_norm_with_update", "_batch_norm_with_update_functional", "batch_norm_stats", "batch_norm_update_stats"),
)
_READS: Final = ("_local_scalar_dense", "equal", "is_nonzero")
BATCH_STATISTICS: Final = "statistics of a batch, which depend on how ranks divide it:"
"""How a note of them begins; the line of the script follows."""
SEEN: Final = frozenset((*DRAW, *_STATISTICS, *_READS))
"""Names of the operators that ``see`` looks at."""


def see(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what such an operator means, if it means anything where it is called."""
    frame = sys._getframe(2)
    if operator.base in DRAW:
        if torch_private.is_in_backward():
            note(f"random numbers in a backward: {operator.name}")
        elif where := _within(frame):
            note(f"random numbers in {where}: {operator.name}")
    elif operator.base in _STATISTICS:
        if any(value is True for value in args) and not _is_of_instance(frame):
            note(BATCH_STATISTICS)
    else:
        _see_read(frame)


def _see_read(frame: FrameType | None) -> None:
    """Note that the script reads a value; what torch reads for itself is none of the script's."""
    while frame is not None and any(part in frame.f_code.co_filename for part in _OF_TENSORS):
        frame = frame.f_back
    if frame is None:
        return
    path = frame.f_code.co_filename
    if path.endswith("torch/amp/grad_scaler.py"):
        note("a gradient scaler looked for gradients that are not finite")
    elif not frames_private.is_torch(path):
        operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        note("a branch on a value" if operation.startswith(_BRANCHES) else "a value was read")


_OF_TENSORS: Final = ("torch/_tensor.py", "torch/distributed/tensor/", "torch/_ops.py")
_BRANCHES: Final = ("POP_JUMP", "JUMP_IF", "TO_BOOL", "UNARY_NOT")
"""How the names of those operations of Python begin that ask whether a value is true."""

_WITHIN: Final = {
    ("torch/nn/modules/module.py", "_call_impl"): "a forward",
    ("torch/optim/optimizer.py", "wrapper"): "a step of an optimizer",
}
"""File of torch and name of a function -> what runs within it."""


def _within(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("_call_impl", "wrapper"):
            for (path, name), what in _WITHIN.items():
                if code.co_name == name and code.co_filename.endswith(path):
                    return what
        frame = frame.f_back
    return ""


def _is_of_instance(frame: FrameType | None) -> bool:
    """Whether statistics are those of each sample: torch computes them as of a batch of one."""
    while frame is not None and frames_private.is_torch(frame.f_code.co_filename):
        if frame.f_code.co_name == "instance_norm":
            return True
        frame = frame.f_back
    return False
