"""Padding of flat shards: always zero, and never read. Two promises, two laws, two separate runs."""

from __future__ import annotations

from fsdpcheck import observers, strategies
from fsdpcheck.case import Case
from fsdpcheck.checks import assert_clipped_update, assert_global_norm, assert_padding_zero, assert_parameters_equal
from fsdpcheck.law import law
from fsdpcheck.runner import Run


@law("padding.zero", promise="padding.zero", draw=strategies.plain, observe=("shards",), ranks=2)
def test_padding_stays_zero(case: Case, run: Run) -> None:
    """Padding is zero after init, after reduce-scatter and after the optimizer step, in parameters and gradients.

    FSDP1 fills its padding with 42 on purpose and does not promise this. Source: claim B4; pytorch#113106.
    """
    assert_padding_zero(run(case, observers=(observers.PADDING,)))


@law("padding.unread", promise="padding.unread", draw=strategies.plain, observe=("shards",), ranks=2)
def test_padding_is_never_read(case: Case, run: Run) -> None:
    """NaN written into padding before forward, clipping and the optimizer changes no parameter.

    Source: claim B4'; DeepSpeed#1380, Megatron-LM#5077.
    """
    assert_parameters_equal(run(case, observers=(observers.POISON_PADDING,)), run.answer(case))


@law(
    "padding.unread-global-norm",
    promise="padding.unread",
    draw=strategies.global_norm,
    observe=("shards", "grad_norm"),
    ranks=2,
)
def test_padding_does_not_enter_the_global_norm(case: Case, run: Run) -> None:
    """NaN in the padding of gradient shards changes neither the global norm nor the clipped update.

    The norm within its bound, since a gradient divided by an N that is no power of two has rounded squares.
    """
    poisoned, answer = run(case, observers=(observers.POISON_PADDING,)), run.answer(case)
    assert_global_norm(poisoned, answer, run.features.global_norm)
    assert_clipped_update(poisoned, answer, run.features.global_norm)
