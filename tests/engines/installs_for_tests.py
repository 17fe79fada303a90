"""An install and an observer, as a user writes them beside an adapter."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


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


def watch(moment: str, trainer: Any, rank: int) -> object:
    return (rank, len(trainer.parameters())) if moment in ("after_init", "after_step") else None
