"""Lifecycle: what is alive at the moments that an implementation announces, and what a step leaves behind.

Laws with "units" see memory and gradients that units hold then. Not seen: what is alive between two moments, such as
the second unit that is gathered ahead while one computes. The laws on hooks, memory and interruptions see what a user's
own hooks on the modules see.
"""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.gathered_parameters import assert_gathered_once, assert_scheduled
from fsdpcheck.checks.hooks_and_memory import (
    assert_copies,
    assert_hooks_fire,
    assert_loss_kept,
    assert_noise_undisturbed,
    assert_parameter_hooks_fire,
    assert_steady_memory,
    assert_undisturbed,
    interruptions,
)
from fsdpcheck.checks.lifecycle import assert_aliased, assert_few_gathered, assert_released
from fsdpcheck.checks.noise import noisy
from fsdpcheck.checks.training import assert_parameters_equal
from fsdpcheck.errors import NotExact
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.strategies import EQUAL_BITS, PLAIN, CaseSpace, Family

_ANY = CaseSpace(clipping=("none", Family("unclipped", ("private",))))
"""Plain steps, and private ones, with one backward or two."""
_ALONE = _ANY.but(worlds=(1,))
"""On one rank, whatever numbers are asked for: the law speaks of no other."""
_SEVERAL_UNITS = CaseSpace(
    clipping=("none", Family("probe", ("private", "real")), Family("unclipped", ("private",), unless=("real",))),
    numbers="either",
    steps=(2, 2, 3),
    units=3,
)
"""Plain and private steps, two at least, of three units where they can be; real numbers need no proof."""


@law(
    "lifecycle.gathered",
    promise="lifecycle",
    space=_ANY.but(
        ranks=2, must_occur=("micro-batches",), vacuous_without=("several units sharded over several ranks",)
    ),
    observe=("units",),
)
def test_the_root_and_one_inner_unit_at_most_are_gathered(case: TrainingCase, run: Run) -> None:
    """At every moment that an adapter announces at most one inner unit holds gathered parameters, beside the root.

    All moments of a step must be announced (``adapter.Moment``). Where parameters are to be kept after the forward,
    each inner unit may hold its own until the backward is over.
    Not seen: what is gathered between two announced moments, and what a unit does not tell of itself.
    Source: pytorch#83129.
    """
    assert_few_gathered(run(case, probes=(probes.units,)))


@law(
    "lifecycle.released",
    promise="lifecycle",
    space=_ANY.but(must_occur=("several ranks", "several units sharded over several ranks")),
    observe=("units",),
)
def test_a_step_leaves_nothing_gathered_and_no_local_gradient(case: TrainingCase, run: Run) -> None:
    """After a step no unit holds gathered parameters or an unreduced gradient; before the first one neither.

    Zeros in place of a gradient are memory too.
    Not seen: memory that belongs to no unit, such as buffers of collectives.
    Source: pytorch#83129, pytorch#92731.
    """
    assert_released(run(case, probes=(probes.units,)))


@law(
    "lifecycle.aliased",
    promise="lifecycle",
    space=_ALONE.but(must_occur=("several units", "frozen")),
    observe=("units",),
)
def test_on_one_rank_the_shard_is_the_whole(case: TrainingCase, run: Run) -> None:
    """With one rank the shard and the unsharded parameters are one memory, at every moment: nothing is held twice.

    Also with frozen parameters and either number of backwards. All moments must be announced (``adapter.Moment``).
    Not seen: copies that a unit does not tell of; replicas of one shard, which hold the whole as well.
    Source: FlatParameter of FSDP, arXiv:2304.11277; claim B7; no public report known.
    """
    assert_aliased(run(case, probes=(probes.units,)))


@law(
    "lifecycle.hooks",
    promise="hooks",
    space=PLAIN.without("evaluation", "unequal-micro-batches").but(
        must_occur=("several ranks", "several units", "micro-batches")
    ),
)
def test_hooks_of_the_user_fire_as_on_a_single_device(case: TrainingCase, run: Run) -> None:
    """Hooks before and after the forward and the backward of every module fire as often as on a single device.

    On each rank, in each step, with its own micro-batches; they were registered before sharding.
    Not seen: hooks on parameters, and what hooks are given; unequal numbers of micro-batches, which may be made equal.
    Source: torchrec#4268, Opacus#738; claim D8 of docs/claims.md.
    """
    assert_hooks_fire(run(case, probes=(probes.hook_calls,)))


@law(
    "lifecycle.parameter-hooks",
    promise="parameter-hooks",
    space=PLAIN.but(must_occur=("several ranks", "several units", "micro-batches")),
)
def test_hooks_on_parameters_fire_once_a_reduction(case: TrainingCase, run: Run) -> None:
    """Post-accumulate hooks on the parameters that the optimizer updates fire once for each reduction of gradients.

    An optimizer that steps inside the backward depends on them. Of a parameter without a gradient they need not fire.
    Not seen: what the gradient is when they fire; private training; which parameters they do not fire of.
    Source: torchrec#4268.
    """
    without_gradient = [len(step.gradients.keys() - step.reached) for step in run.answer(case).steps]
    assert_parameter_hooks_fire(run(case, probes=(probes.accumulations,)), without_gradient)


@law(
    "lifecycle.memory",
    promise="memory",
    space=_SEVERAL_UNITS.but(
        ranks=2, must_occur=("micro-batches",), vacuous_without=("several units sharded over several ranks",)
    ),
)
def test_every_step_gathers_what_its_schedule_has(case: TrainingCase, run: Run) -> None:
    """At each layer the root, the unit at work and the next one at most are gathered; every step as the first.

    Those that are kept for a backward to come are gathered as well, and not anew: no unit is gathered more often than
    its layers come up. Parameters lie in the same bytes after each step as
    before the first, and at most in as many in each step. Two steps or more, three units where no tied weight keeps
    layers together; where "real" is accepted, numbers that nothing is compared with.
    On GPUs that ranks do not share, the allocator has given out as much after each step as after the first.
    Not seen: other memory than the modules' own parameters, but what is left on such GPUs, such as the buffers in which
    FSDP2 gathers ahead.
    Source: ``reshard_after_forward`` of ``fully_shard``; arXiv:2304.11277, section 3.3.2; pytorch#83129,
    pytorch#105635, ROCm/pytorch#3501.
    """
    execution = run(case, probes=(probes.memory, probes.gathered))
    assert_steady_memory(execution)
    assert_scheduled(execution)
    assert_gathered_once(execution)


@law("lifecycle.copies", promise="copies", space=_ANY.but(must_occur=("several ranks",)))
def test_what_is_shown_is_a_copy(case: TrainingCase, run: Run) -> None:
    """Writing into the parameters and gradients that a trainer shows changes neither, nor the training.

    On one rank too, where the whole may be the shard itself.
    Not seen: norms, factors and optimizer states that are shown.
    Source: ``DTensor.full_tensor``, which gives away live memory there; no public report known.
    """
    execution, answer = run(case, probes=(probes.scribbled,)), run.answer(case)
    assert_copies(execution)
    assert_parameters_equal(execution, answer)


@law("lifecycle.loss", promise="plain", space=_ANY.but(must_occur=("several ranks", "several steps")))
def test_the_loss_is_left_as_it_was_given(case: TrainingCase, run: Run) -> None:
    """Behind every step the loss that an implementation was given has its options, its class and no hook more.

    So that a validation which its user computes with it is what it was. Private steps too.
    Not seen: what is changed within a step and changed back; a loss that is no module.
    Source: Opacus' DPLossFastGradientClipping, which sets ``criterion.reduction`` for the length of a call and, where
    that raises, for good; no public report known.
    """
    assert_loss_kept(run(case, probes=(probes.loss_kept,)))


@law(
    "lifecycle.interrupted",
    promise="interrupts",
    space=EQUAL_BITS.without("evaluation", "routed", "routed-private").but(
        must_occur=("several ranks", "several units sharded over several ranks", "micro-batches"),
        vacuous_without=("non-zero gradient",),
    ),
)
def test_a_step_that_raised_leaves_a_trainer_that_goes_on(case: TrainingCase, run: Run) -> None:
    """A step that raises on every rank, and is taken again, has the single device's bits, and leaves no memory held.

    In the forward, in the backward, or in the second micro-batch. Steps that clip have noise besides, where "noise" is
    promised, and the bits of the noisy training that nothing interrupts.
    Not seen: a rank that raises alone and leaves the others waiting, which no implementation can help.
    Source: pytorch#82203, pytorch#73535, and ``FSDPModule.reset_iter_state``.
    """
    kinds = [probes.interrupt_forward, probes.interrupt_backward]
    kinds += [probes.interrupt_later] * (case.step.micro_batches > 1)
    chosen = kinds[case.seed % len(kinds)]
    with_noise = case.step.clipping == "exact" and "noise" in run.features.promises
    case = noisy(case) if with_noise else case
    execution = run(case, probes=(probes.memory, chosen))
    if not interruptions(execution, chosen):
        raise NotExact("the layer in the middle has no backward")
    if with_noise:
        assert_noise_undisturbed(execution, run(case))
    else:
        assert_undisturbed(execution, run.answer(case), lambda: run(case))
    assert_steady_memory(execution)
