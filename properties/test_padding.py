"""Shards: they cover the parameters once, and their padding is always zero, and never read.

Padding has two promises, two laws, two separate runs; where no rank has any, nothing is claimed. Shards that are empty,
because there are more ranks than rows or elements, are among the cases of all.
"""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.clipping import assert_clipped_update, assert_global_norm
from fsdpcheck.checks.shards import assert_covered
from fsdpcheck.checks.training import assert_padding_poisoned, assert_padding_zero, assert_parameters_equal
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.strategies import GLOBAL_NORM, PLAIN, CaseSpace, Family

_DIFFERENT_NUMBERS = CaseSpace(
    clipping=(Family("none", ("plain",)), Family("probe", unless=("plain",))), numbers="either", adjusted=("one step",)
)
"""One step on real numbers, which tell elements apart, where they are accepted; plain where that is promised."""


@law(
    "shards.cover",
    promise="sharded",
    space=_DIFFERENT_NUMBERS.but(ranks=2, must_occur=("several units", "uneven-rows", "frozen", "hsdp")),
)
def test_every_element_lies_on_one_rank(case: TrainingCase, run: Run) -> None:
    """Before and after a step every element of every trained parameter lies on one rank of a replica, and no other.

    Seen by values: tensors that the optimizer updates, with zeros for as much padding as is shown. So nothing is
    updated, counted in a norm or given noise twice.
    Not seen: where in a shard an element lies; which of several equal values is missing.
    Source: ZeRO, arXiv:1910.02054; DeepSpeed#8277, Megatron-LM#5898, pytorch#154888.
    """
    watched = (probes.local_tensors, *[probes.padding] * ("shards" in run.features.observables))
    beside = run.features.functions and case.model.own is not None and not case.step.private
    assert_covered(run(case, probes=watched), beside)


@law(
    "padding.zero",
    promise="padding.zero",
    space=PLAIN.but(ranks=2, must_occur=("several units",)),
    observe=("shards",),
)
def test_padding_stays_zero(case: TrainingCase, run: Run) -> None:
    """Padding is zero after init, reduce-scatter, clipping and the optimizer step, in parameters and gradients.

    The moments after_reduce and before_step must be announced. FSDP1 fills its padding with 42 on purpose
    (pytorch#113106) and does not promise this.
    Not seen: padding that the adapter does not show; moments between those that it announces.
    Source: claim B4; pytorch#121509, where padding was what the memory held.
    """
    assert_padding_zero(run(case, probes=(probes.padding,)))


@law(
    "padding.unread",
    promise="padding.unread",
    space=PLAIN.but(ranks=2, must_occur=("several units",)),
    observe=("shards",),
)
def test_padding_is_never_read(case: TrainingCase, run: Run) -> None:
    """NaN written into padding before forward, clipping and the optimizer changes no parameter.

    The moments after_reduce and before_step must be announced.
    Not seen: reads between other moments, and values of NaN that are read and masked away.
    Source: claim B4'; DeepSpeed#1380, Megatron-LM#5077.
    """
    execution = run(case, probes=(probes.poison_padding,))
    assert_padding_poisoned(execution)
    assert_parameters_equal(execution, run.answer(case))


@law(
    "padding.unread-global-norm",
    promise="padding.unread",
    space=GLOBAL_NORM.but(ranks=2, must_occur=("several units",)),
    observe=("shards", "grad_norm"),
)
def test_padding_does_not_enter_the_global_norm(case: TrainingCase, run: Run) -> None:
    """NaN in the padding of gradient shards changes neither the global norm nor the clipped update.

    The norm within its bound, since a gradient divided by an N that is no power of two has rounded squares.
    The moments after_reduce and before_step must be announced.
    Not seen: values of NaN that are read and masked away; reads of the padding of parameters (padding.unread).
    Source: pytorch#121509, where padding that nobody had written gave false NaN.
    """
    poisoned, answer = run(case, probes=(probes.poison_padding,)), run.answer(case)
    assert_padding_poisoned(poisoned)
    assert_global_norm(poisoned, answer, run.features.global_norm)
    assert_clipped_update(poisoned, answer, run.features.global_norm)
