"""Streams of simulated ranks that share a GPU: each rank has one, and what they exchange is ordered by events.

Work on a GPU is only queued, so the order in which ranks run on the host says nothing of the order in which their
kernels run. A rank's kernels run on its own stream, as on a GPU of its own: whoever computes what a collective gives
comes after what each member had queued when it issued its call, and who takes a result comes after that. Nothing else
orders the streams of two ranks.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html, "CUDA streams" (events, and ``record_stream`` for memory
that another stream still reads). Tried with stand-ins for streams and events; on a GPU by the rows of ``python -m
benchmarks gpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdpcheck.simulation.current_rank import require_rank


class OnHost:
    """Ranks on the processors: what has run is done."""

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Open on the thread of a rank while it runs."""
        yield

    def issued(self) -> Any:
        """What the rank that runs has queued so far."""

    def after(self, marks: Iterable[Any]) -> None:
        """What the thread that runs queues from now on comes after these."""

    def used(self, tensors: Iterable[Tensor]) -> None:
        """The thread that runs reads what another has allocated."""


class OnGpu(OnHost):
    """Ranks on one GPU. ``cuda``: torch.cuda, or what stands in for it."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams: dict[int, Any] = {}

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Each rank has the same stream in all runs: memory that it gave back there, it may be given again."""
        rank = require_rank()
        if rank not in self._streams:
            self._streams[rank] = self._cuda.Stream()
        with self._cuda.stream(self._streams[rank]):
            yield

    def issued(self) -> Any:
        return self._cuda.current_stream().record_event()

    def after(self, marks: Iterable[Any]) -> None:
        stream = self._cuda.current_stream()
        for mark in marks:
            if mark is not None:
                stream.wait_event(mark)

    def used(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cuda":
                tensor.record_stream(self._cuda.current_stream())


ON_HOST = OnHost()
