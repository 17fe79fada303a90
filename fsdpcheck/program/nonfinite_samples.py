"""Steps in which a sample is put out of use: the batch that they take, and what a rank holds that has refused it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fsdpcheck.adapters.contract import Batch
from fsdpcheck.execution import RankResult, Refused, RunRequest
from fsdpcheck.workload import models


def batch_of(batch: Batch, request: RunRequest) -> Batch:
    """``batch`` with the targets of some samples put out of use.

    Where targets stand for classes, as they may in a user's own model, those of the instrument alone.
    """
    case, chosen = request.training, dict(request.spoiled)
    if not chosen:
        return batch
    classes = case.step.loss == "cross_entropy" or case.model.own is not None
    first = -models.instrument_width(case) if classes else 0
    for micro in batch.micro_batches:  # rows of its own: layouts.batch has indexed them out
        for row, sample in enumerate(micro.indices):
            if sample in chosen:
                micro.targets[row, first:] = chosen[sample]
    return batch


@contextmanager
def refusal(request: RunRequest, result: RankResult, held: Callable[[], list[Tensor]]) -> Iterator[None]:
    """Note in ``result`` what ``held()`` gives before and after a step that raises over a sample put out of use.

    ``held`` must not communicate: other ranks may be anywhere by then.
    """
    if not request.spoiled:
        yield
        return
    before = _copied(held())
    try:
        yield
    except Exception:
        result.refused = Refused(before, _copied(held()))
        raise


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
