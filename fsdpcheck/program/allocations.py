"""Where a rank's program asks torch for memory without values: lines noted, or zeros in place of one line's memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fsdpcheck.compat import frames_private

_ALLOCATE = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted,
    Tensor.new_empty, Tensor.new_empty_strided, Tensor.resize_,
}  # fmt: skip


class Allocations(TorchFunctionMode):
    """While entered on a thread, ``sites`` gets "file:line" of its calls, innermost outside torch but for FSDP.

    What is returned at the site ``zeroed`` is zeros. C++ and ``storage.resize_`` are not seen.
    """

    def __init__(self, sites: list[str], zeroed: str = "") -> None:
        super().__init__()
        self._sites, self._zeroed = sites, zeroed

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _ALLOCATE:
            site = _site(sys._getframe(1))
            if site not in self._sites:
                self._sites.append(site)
            if site == self._zeroed:
                with torch.no_grad():
                    found.zero_()
        return found


def _site(frame: FrameType | None) -> str:
    while frame is not None and frames_private.is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
