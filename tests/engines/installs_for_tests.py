"""An install and a probe, as a user writes them beside an adapter."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fsdpcheck.program.probe import Notes, probe


class counting:
    """An install that counts calls of all_reduce."""

    hits = 0

    def __enter__(self) -> counting:
        self._native = dist.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.hits += 1
            return self._native(*args, **kwargs)

        dist.all_reduce = counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._native  # type: ignore[assignment]


@probe(at=("after_init", "after_step"))
def watch(trainer: Any, notes: Notes) -> object:
    return notes.rank, len(trainer.parameters())
