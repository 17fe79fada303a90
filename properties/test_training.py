"""Equality: sharded training is single-device training."""

from __future__ import annotations

from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.refused_or_right import THAWED, TIED_APART, assert_refused_or_trained
from fsdpcheck.checks.training import assert_gradients_equal, assert_outputs_equal, assert_parameters_equal
from fsdpcheck.checks.unobserved_training import assert_trained
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import EQUAL_BITS, PLAIN, PLAIN_ANY_SUM, PRIVATE_EXACT, PRIVATE_UNCLIPPED


@law(
    "training.plain",
    promise="plain",
    space=PLAIN_ANY_SUM.but(
        must_occur=(
            "distributed batch on several ranks",
            "several units",
            "several steps",
            "three steps with a bias",
            "micro-batches",
            "hsdp",
        ),
        vacuous_without=("non-zero gradient",),
    ),
)
def test_plain_training_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """After every step of plain training, every rank's parameters are the single device's, bit for bit.

    For every layout of the batch, sum or mean reduction, micro-batches, frozen and tied parameters. Half of the cases
    of several steps are looked at after the last alone, so that nothing is right only because it is looked at.
    Not seen: errors that both sides make alike, for model and optimizer are the same code; with Adam, a wrong scale.
    Source: ZeRO, arXiv:1910.02054; FSDP, arXiv:2304.11277; wrong divisors, torchtune#2172 and torchtitan#2206.
    """
    assert_trained(lambda late: run(case, late=late), run.answer(case))


@law(
    "training.gradients",
    promise="plain",
    space=PLAIN_ANY_SUM.but(
        must_occur=(
            "distributed batch on several ranks",
            "several units",
            "several steps",
            "three steps with a bias",
            "micro-batches",
            "hsdp",
        ),
        vacuous_without=("non-zero gradient",),
    ),
    observe=("grads",),
)
def test_the_averaged_gradient_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """The gradient given to the optimizer is the released gradient (1/N) * sum over the logical batch, bit for bit.

    Sees a wrong scale that an optimizer such as Adam hides.
    Not seen: what the update makes of the gradient; errors that the single device makes too.
    Source: torchtitan#800.
    """
    assert_gradients_equal(run(case), run.answer(case))


@law(
    "training.tied-apart",
    promise="plain",
    space=PLAIN.without("tied", "conv", "bags", "group-norm", "layer-norm").but(
        user_models="never",
        must_occur=("distributed batch on several ranks", "several steps"),
        vacuous_without=("non-zero gradient",),
        adjusted=("tied apart",),
    ),
    needs_traits=("tied",),
)
def test_a_weight_of_two_units_is_refused_or_trained_as_one(case: TrainingCase, run: Run) -> None:
    """A weight that layers of two sharding units share is refused, or every rank's parameters are the single device's.

    Of who accepts weights that are shared within a unit. In each drawn case two layers behind the input share one
    weight and stand in units of their own.
    Not seen: the reason of what is raised; weights shared by an Embedding and the head, by more than two layers.
    Source: Lightning#21613, accelerate#4171, torchtitan#2817; docs/upstream/fsdp1_tied_weights_of_two_units.py.
    """
    assert_refused_or_trained(lambda one: (run(one), run.answer(one)), case, TIED_APART)


@law(
    "training.thawed",
    promise="thawing",
    space=PLAIN.but(
        user_models="never",
        must_occur=("distributed batch on several ranks", "several units"),
        vacuous_without=("non-zero gradient",),
        adjusted=("thawed",),
    ),
    needs_traits=("frozen",),
)
def test_what_is_thawed_between_steps_is_trained(case: TrainingCase, run: Run) -> None:
    """A layer that is frozen in the first step and thawed behind it is trained as on a single device, or refused.

    The optimizer has its parameters from the beginning. In each drawn case the first layer is frozen so; in a
    share of them it is frozen again behind the second step, and from then on neither moments nor weight decay move it.
    Not seen: the reason of what is raised; what is frozen or thawed within a step; private training; mixed
    precision, in which ``fully_shard`` of torch 2.13 raises (pytorch#186998).
    Source: pytorch#104148, pytorch#105371, Lightning#20340: gradual unfreezing (arXiv:1801.06146).
    """
    assert_refused_or_trained(lambda one: (run(one), run.answer(one)), case, THAWED)


@law(
    "training.evaluation",
    promise="plain",
    space=EQUAL_BITS.but(
        adjusted=("evaluated",),
        must_occur=("distributed batch on several ranks", "several units", "several steps", "hsdp"),
        vacuous_without=("non-zero gradient",),
    ),
)
def test_an_evaluation_between_steps_is_right_and_leaves_nothing(case: TrainingCase, run: Run) -> None:
    """Before each step the model, in eval mode and without gradients, gives the single device's outputs, bit for bit.

    And training goes on as if nobody had looked: parameters are the single device's after every step. Private training
    too, where its bits are promised: what hooks keep of a forward is not to reach the next step's norms.
    Not seen: layers that do something else in eval mode, which no model has.
    Source: pytorch#113203, where a forward in inference mode broke the training after it.
    """
    execution, answer = run(case), run.answer(case)
    assert_outputs_equal(execution, answer)
    assert_parameters_equal(execution, answer)


@law(
    "training.unequal-micro-batches",
    promise="plain",
    space=EQUAL_BITS.but(
        adjusted=("unequal micro-batches",),
        must_occur=("distributed batch on several ranks", "several units"),
        vacuous_without=("non-zero gradient",),
    ),
    needs_traits=("unequal-micro-batches",),
)
def test_ranks_may_have_unequal_numbers_of_micro_batches(case: TrainingCase, run: Run) -> None:
    """Where ranks have unequal numbers of micro-batches all of them finish, and parameters are the single device's.

    Of who accepts it, in plain and in private training; all others may hang there, and no case shows it. Some ranks
    have one micro-batch fewer than others; gradients are reduced after each rank's last.
    Not seen: ranks with no micro-batch at all; numbers that differ by more than one, or from step to step.
    Source: pytorch#38174 and Lightning#20404, uneven inputs of DistributedDataParallel.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "training.steps-counted",
    promise="plain",
    space=EQUAL_BITS.without("conv", "conv-private", "bags", "bags-private", "group-norm", "group-norm-private").but(
        user_models="never",
        adjusted=("left out",),
        must_occur=("distributed batch on several ranks", "several units"),
        vacuous_without=("parameter left out of a step of Adam",),
    ),
    needs_traits=("routed", "adam"),
)
def test_the_steps_of_a_parameter_are_counted_as_on_a_single_device(case: TrainingCase, run: Run) -> None:
    """With Adam and a layer that some samples leave out, parameters are the single device's after every step.

    Adam's bias correction counts steps. Which count of a parameter that no sample of a step uses is declared
    (``ArithmeticRule.unused``): none as in torch, where its gradient is None, or all where it is zero; on every rank
    alike, whichever has samples that use it. In each drawn case the layer stands behind the input, and there are
    five steps where those can be proved; private training too, where its bits are promised.
    Not seen: counters that are saved and loaded (state.resumed); a count that is off by the same for all parameters
    shows in the first step, in training.plain too.
    Source: DeepSpeed#8471, DeepSpeed#1823, TransformerEngine#1986.
    """
    assert_parameters_equal(run(case), run.answer(case))


@law(
    "training.private-unclipped",
    promise="private",
    space=PRIVATE_UNCLIPPED.but(
        must_occur=(
            "distributed batch on several ranks",
            "several units",
            "several steps",
            "three steps with a bias",
            "micro-batches",
        ),
        vacuous_without=("non-zero gradient",),
    ),
)
def test_private_training_below_the_clip_norm_is_plain_training(case: TrainingCase, run: Run) -> None:
    """With C above every per-sample norm, private training is single-device training, bit for bit.

    Asked of every private implementation: all factors are 1 whatever the rounding of its norms. Noise is off.
    Not seen: how norms and factors are formed: an implementation that never clips holds.
    Source: DP-SGD, arXiv:1607.00133; Opacus#324, where one path had no W in its divisor and its steps did nothing.
    """
    assert_trained(lambda late: run(case, late=late), run.answer(case))


@law(
    "training.private-clipped",
    promise="exact-factors",
    space=PRIVATE_EXACT.but(
        must_occur=(
            "distributed batch on several ranks",
            "several units",
            "several steps",
            "three steps with a bias",
            "unclipped sample",
        ),
        vacuous_without=("clipped sample",),
    ),
)
def test_clipped_training_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """With samples above, at and just below the clip norm, private training is single-device training, bit for bit.

    Needs factors that are a function of the one squared norm of a sample: nested square roots miss the exact power of
    two by an ulp. Noise is off.
    Not seen: an eps that is left out (clipping.coefficients); with Adam, a wrong scale.
    Source: ghost clipping, arXiv:2110.05679; wrong norms, Opacus#751 and Opacus#413.
    """
    assert_trained(lambda late: run(case, late=late), run.answer(case))


@law(
    "training.private-gradients",
    promise="exact-factors",
    space=PRIVATE_EXACT.but(
        must_occur=(
            "distributed batch on several ranks",
            "several units",
            "several steps",
            "three steps with a bias",
            "unclipped sample",
        ),
        vacuous_without=("clipped sample",),
    ),
    observe=("grads",),
)
def test_the_clipped_gradient_is_the_single_device_one(case: TrainingCase, run: Run) -> None:
    """The gradient given to the optimizer is (1/N) * sum of clipped per-sample gradients, bit for bit.

    Sees a wrong scale that an optimizer such as AdamW hides from the parameters.
    Not seen: an eps that is left out (clipping.coefficients); noise, which is off.
    Source: Opacus#683, torchtitan#800.
    """
    assert_gradients_equal(run(case), run.answer(case))
