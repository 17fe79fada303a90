"""Profile: how long a rank spends in each part of its private steps, and how often. Off by default.

Parts nest: ``"first backward/stack"`` is inside ``"first backward"``.

| part                                       | what                                                                    |
|--------------------------------------------|-------------------------------------------------------------------------|
| independence                               | asking, before the first step, whether samples mix                      |
| first backward                             | to the layers' outputs                                                  |
| norms of LAYER (in it, or after it)        | local compute: the squared norms of one layer, or of several that share |
| stack (in it)                              | the layers' squared norms added up                                      |
| aggregation                                | over ranks, where contributions are partial                             |
| clip factors, final (in it)                | from squared norms; their roots                                         |
| second backward, or weighted gradients     | in two passes, or with bookkeeping                                      |
| forward, reduction, noise, update          | as in a plain step                                                      |

Counted: layers with norms. Times are wall-clock seconds on this rank; on a GPU the
device is synchronised at both ends of every part, which is why a profile is never on by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Span:
    """One stay in a part: ``start`` and ``seconds`` of ``time.perf_counter``; ``depth`` counts enclosing parts."""

    part: str
    start: float
    seconds: float
    depth: int


@dataclass
class Profile:
    """Spans of one rank, in the order in which they ended; ``counts`` of things that happen in no time worth a span."""

    rank: int = 0
    spans: list[Span] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    _open: list[str] = field(default_factory=list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A part of the step; also when it raises."""
        path = "/".join([*self._open, name])
        _synchronise()
        self._open.append(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            _synchronise()
            self._open.pop()
            self.spans.append(Span(path, start, time.perf_counter() - start, len(self._open)))

    def count(self, what: str, number: int = 1) -> None:
        """Add to a counter."""
        self.counts[what] = self.counts.get(what, 0) + number

    def table(self) -> list[tuple[str, int, float]]:
        """(part, times entered, seconds in all), in the order of first entry."""
        found: dict[str, tuple[int, float]] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            entered, seconds = found.get(span.part, (0, 0.0))
            found[span.part] = entered + 1, seconds + span.seconds
        return [(part, entered, seconds) for part, (entered, seconds) in found.items()]

    def text(self) -> str:
        """The table to print: a line a part, indented by depth, and one a counter."""
        lines = [f"rank {self.rank:<43} {'times':>7} {'seconds':>12}"]
        for part, entered, seconds in self.table():
            depth, _, name = part.count("/"), *part.rpartition("/")[1:]
            lines.append(f"{'  ' * depth + name:<48} {entered:>7} {seconds:>12.6f}")
        return "\n".join([*lines, *(f"{what:<48} {number:>7}" for what, number in self.counts.items())])

    def trace_events(self) -> list[dict[str, Any]]:
        """Complete events of the Trace Event Format (Perfetto, chrome://tracing), one process a rank, microseconds."""
        return [
            {
                "name": span.part.rpartition("/")[2],
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "pid": self.rank,
                "tid": 0,
            }
            for span in sorted(self.spans, key=lambda span: span.start)
        ]


class Off:
    """No profile: the same calls, which do nothing."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        yield

    def count(self, what: str, number: int = 1) -> None:
        pass


OFF = Off()


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
