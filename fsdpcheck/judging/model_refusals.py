"""Model refusals: an implementation may refuse a user's model; that is neither a pass nor a finding.

An adapter declares which of the harness's models it accepts, so raising on one of those is a finding. A user's model
may hold what no declaration has a word for. A model that raises on a single device, on the same samples, is no finding
either. Nor is a model whose output for a sample depends on the samples beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fsdpcheck.case import Case, TrainingCase, user_model
from fsdpcheck.execution import Execution, Failure, RankState, RunRequest
from fsdpcheck.workload import batches, models, numerics
from fsdpcheck.workload.user_model.single_device import Alone, Stumble, watched

_ALONE = "your model raises on a single device too, from the same samples"
_MIXES = "your model mixes samples: what it gives for one depends on how many are computed together, or on its place"
_TOLD = NotImplementedError.__name__


def refused(execution: Execution) -> str:
    """The report of a run in which every rank raised NotImplementedError at one place on a user's model; else "".

    One rank that raises while another goes on is a finding, whatever it raises: the other waits for it.
    """
    failure = execution.failure
    if failure is None or failure.kind != "raised" or user_model(execution.request.case) is None:
        return ""
    return failure.text if _alike(failure) else ""


def raised_alone(execution: Execution) -> str:
    """What every rank raised on a user's model, if a single device raises it too, from a micro-batch of each; else "".

    Before the first step, with the parameters that the case begins with: what is raised later alone stays a finding.
    """
    failure, case = execution.failure, execution.request.case
    if failure is None or user_model(case) is None:
        return ""
    if failure.kind in ("lost", "exited"):  # ends this process too if the model does it; that is reported of the model
        for rank in range(case.world_size):
            _stumble(execution.request, RankState(rank, failure.kind))
    if failure.kind != "raised" or any(rank.state != "raised" for rank in failure.ranks):
        return ""
    stumbles = [_stumble(execution.request, rank) for rank in failure.ranks]
    if not stumbles or not all(stumbles):
        return ""
    found = stumbles[0]
    assert found is not None
    return f"{_ALONE}\n  got     {found.error}\n  wanted  no exception\n  where   {found.where}"


def _stumble(request: RunRequest, rank: RankState) -> Stumble | None:
    """What a single device raises from one of a rank's micro-batches, if that is what the rank raised."""
    case = request.training
    for step in range(case.step.steps):
        for micro in batches.batch(case, step, rank.rank, request.instrument).micro_batches:
            found, model = Alone(), models.build(case)
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            with numerics.of(case), watched(model, models.DTYPES[case.arithmetic.dtype], found):
                losses = models.loss_for(case)(model(micro.inputs), micro.targets)
                torch.autograd.grad(losses.sum(), trained, allow_unused=True)
            if found.stumble is not None and found.stumble.error in "\n".join(rank.stack):
                return found.stumble
    return None


def mixes(case: Case) -> str:
    """The report of a user's model that gives a sample another gradient in a rank's micro-batch than alone; else "".

    Of cases of integers, whose gradients were proved exact; with the parameters that the case begins with.
    """
    if not isinstance(case, TrainingCase) or case.model.own is None or case.arithmetic.numbers == "real":
        return ""
    model = models.build(case)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with numerics.of(case):
        for step, rank in itertools.product(range(case.step.steps), range(case.world_size)):
            for micro in batches.batch(case, step, rank).micro_batches:
                losses = models.loss_for(case)(model(micro.inputs), micro.targets)
                for row, sample in enumerate(micro.indices):
                    one = slice(row, row + 1)
                    alone = models.loss_for(case)(model(micro.inputs[one]), micro.targets[one])
                    other = _differing(trained, losses[row], alone[0])
                    if other:
                        return (
                            f"{_MIXES}\n  got     sample {sample} of step {step}: {other} among {len(losses)} samples\n"
                            f"  wanted  the same bits in any batch: ranks have fewer samples than one device"
                        )
    return ""


def _differing(trained: Mapping[str, nn.Parameter], among: Tensor, alone: Tensor) -> str:
    """The first gradient in which two losses of one sample differ, in words; "" if there is none."""
    found = (
        torch.autograd.grad(loss, [*trained.values()], retain_graph=True, allow_unused=True, materialize_grads=True)
        for loss in (among, alone)
    )
    for name, one, other in zip(trained, *found, strict=True):
        if not torch.equal(one, other):
            place = int((one != other).reshape(-1).nonzero()[0])
            got, wanted = float(one.reshape(-1)[place]), float(other.reshape(-1)[place])
            return f"an entry of the gradient of {name.removeprefix('model.')} is {wanted} alone, {got}"
    return ""


def verdict_text(reports: Iterable[str], refused: int, judged: int) -> str:
    """Why a law is not supported, with the most frequent report."""
    held = f"the other {judged} hold, which is no pass" if judged else "none was judged"
    said = next(iter(reports), "").replace("\n", "\n  ")
    if said.startswith(_MIXES):
        head, then = (
            f"{refused} of {refused + judged} cases are refused",
            "divide by no number of samples, or leave out",
        )
        return f"{head}; {held}\n  {said}\n  next    {then} what knows its place; no implementation is blamed for this"
    if said.startswith(_ALONE):
        head, then = f"{refused} of {refused + judged} cases are refused", "run the model on such a batch by itself"
    else:
        head = f"the adapter refuses {refused} of {refused + judged} cases of your model by {_TOLD}"
        then = "do as it says, or leave such laws out (--law)"
    return f"{head}; {held}\n  {said}\n  next    {then}; what raises is no finding of a wrong step"


def _alike(failure: Failure) -> bool:
    return len({rank.where for rank in failure.ranks}) == 1 and all(_refuses(rank) for rank in failure.ranks)


def _refuses(rank: RankState) -> bool:
    return rank.state == "raised" and any(line.startswith(_TOLD) for line in rank.stack)
