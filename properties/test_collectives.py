"""Collectives: every rank finishes, all ranks call the same things, and no order of ranks changes anything."""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.training import assert_collectives_equal, assert_completed, assert_same_execution
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.cause import Cause
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import EQUAL_BITS, PLAIN, PRIVATE


def _same_calls_in_every_order(case: TrainingCase, run: Run) -> None:
    forward = run(case)
    assert_completed(forward)
    assert_collectives_equal(forward)
    assert_same_execution(forward, run(case, schedule="reversed"))


@law(
    "collectives.plain",
    promise="plain",
    space=PLAIN.but(
        ranks=2, must_occur=("distributed batch on several ranks", "several units", "micro-batches", "ragged")
    ),
)
def test_plain_training_never_hangs(case: TrainingCase, run: Run) -> None:
    """Plain training finishes on every rank with equal collectives, and ranks run in reverse give the same bits.

    Deterministic ranks joined by blocking collectives form a Kahn network: one schedule stands for all, and the second
    run tests the hypothesis.
    Not seen: what depends on time, such as streams of a GPU, or communicators that run at once (nccl#195).
    Source: Kahn 1974; pytorch#158719, pytorch#75902.
    """
    _same_calls_in_every_order(case, run)


@law(
    "collectives.private",
    promise="private",
    space=PRIVATE.but(
        ranks=2,
        must_occur=(
            *("distributed batch on several ranks", "several units", "micro-batches", "empty-rank"),
            "forward without samples beside other shards",
        ),
    ),
)
def test_private_training_never_hangs(case: TrainingCase, run: Run) -> None:
    """Private training finishes on every rank with equal collectives, and ranks run in reverse give the same bits.

    Also with ranks that have no sample, as Poisson sampling gives them.
    Not seen: what depends on time, as above; whether what is sent tells of a record (privacy.collectives).
    Source: Opacus#164, Opacus#516.
    """
    _same_calls_in_every_order(case, run)


@law(
    "collectives.on-real-ranks",
    promise="plain",
    space=EQUAL_BITS.but(must_occur=("several ranks", "several units", "micro-batches")),
    on_real_ranks=True,
)
def test_real_ranks_do_what_simulated_ones_do(case: TrainingCase, run: Run) -> None:
    """Real ranks call the same collectives as simulated ones, rank by rank and group by group, and have the same bits.

    Asked with --engine processes or under torchrun. What ranks of one process share, and processes do not, shows here.
    Not seen: what agrees though both are wrong; other laws compare with the single device.
    Source: pytorch#124555, a global that the last of the ranks that are threads overwrites; docs/findings.md.
    """
    simulated = run.on(SimulatedEngine())(case)
    what = "real ranks do otherwise than simulated ones"
    assert_same_execution(simulated, run(case), lambda: [Cause("engine", _SHARED)], what=what)


_SHARED = "ranks of one process share what processes have apart, or the backend computes otherwise"
