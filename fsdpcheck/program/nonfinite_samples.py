"""Steps in which a sample is put out of use: the batch that they take, and what a rank holds that has refused it.

In plain training one of the sample's targets is: the instrument's gradient then has one element that is not finite, on
the rank that owns it, and all others are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fsdpcheck.adapters.contract import Batch
from fsdpcheck.case import TrainingCase, prng
from fsdpcheck.execution import RankResult, Refused, RunRequest
from fsdpcheck.workload import models


def batch_of(batch: Batch, request: RunRequest) -> Batch:
    """``batch`` with the targets of some samples put out of use: of private training all, of plain training one.

    Where targets stand for classes, as they may in a user's own model, those of the instrument alone.
    """
    case, chosen = request.training, dict(request.spoiled)
    if not chosen:
        return batch
    places = _places(case)
    for micro in batch.micro_batches:  # rows of its own: layouts.batch has indexed them out
        for row, sample in enumerate(micro.indices):
            if sample in chosen:
                micro.targets[row, places] = chosen[sample]
    return batch


def _places(case: TrainingCase) -> slice:
    """Which of a sample's targets, the last of which are the instrument's."""
    width = models.instrument_width(case)
    if not case.step.private:
        place = int(prng.integers(case.seed, "which target", (1,), 0, width - 1)[0]) - width
        return slice(place, place + 1 or None)
    classes = case.step.loss == "cross_entropy" or case.model.own is not None
    return slice(-width if classes else 0, None)


@contextmanager
def refusal(request: RunRequest, result: RankResult, held: Callable[[], list[Tensor]]) -> Iterator[None]:
    """Note in ``result`` what ``held()`` gives before and after a step that raises over a sample put out of use.

    ``held`` must not communicate: other ranks may be anywhere by then.
    """
    if not (request.spoiled and request.training.step.private):
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
