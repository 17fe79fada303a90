"""Streams and events of GPUs that are played on the CPU: what is issued on one is done before the next line runs."""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import torch

_MILLISECONDS: Final = 1e3


class PlayedStream:
    """A stream on which all that is issued has been done already."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device, self.priority, self.cuda_stream = torch.device("cuda", 0), priority, 0

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: PlayedEvent | None = None) -> PlayedEvent:
        event = event or PlayedEvent()
        event.record(self)
        return event

    def __enter__(self) -> PlayedStream:
        return self

    def __exit__(self, *raised: object) -> None: ...


class PlayedEvent:
    """A point in the order of the program; ``elapsed_time`` is that of the CPU between two of them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._at = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: PlayedEvent) -> float:
        """Milliseconds, above 0."""
        return max(later._at - self._at, sys.float_info.epsilon) * _MILLISECONDS
