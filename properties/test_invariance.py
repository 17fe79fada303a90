"""Invariance: how many ranks, units, micro-batches there are, and in which order samples come, must not show.

Each law runs two sibling cases, both proved exact, and compares what they show: an adapter needs to show parameters
only. What both runs do wrong alike is not seen here, but by the chapter on training.
"""

from __future__ import annotations

from functools import partial

from fsdpcheck import diagnosis
from fsdpcheck.adapters.contract import Observable
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks.invariance import assert_initial_equal, assert_same_training, require_same_placement
from fsdpcheck.checks.loss_scaling import TWICE, assert_same_in_doubled_losses
from fsdpcheck.checks.training import assert_same_execution
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.strategies import PLAIN, PRIVATE_PROBE, PRIVATE_UNCLIPPED, REAL, CaseSpace, Family, metamorphic

_PRIVATE = CaseSpace(clipping=("unclipped", Family("exact", unless=("nested",))))
"""Families in which equal sums are promised: all factors 1, or factors that are exact."""


def _same(pair: metamorphic.Pair, run: Run, what: str) -> None:
    first, second = pair
    observe: frozenset[Observable] = run.features.observables & {"grads"}
    one, two = run(first, observe=observe), run(second, observe=observe)
    assert_same_training((one, run.answer(first)), (two, run.answer(second)), what)


_WORLD = "training depends on the number of ranks"
_UNITS = "training depends on how layers are grouped into units"
_RESHARD = "training depends on whether parameters are freed after the forward"
_ORDER = "training depends on the order of samples"
_MICRO = "training depends on the number of micro-batches"


@law(
    "invariance.initial",
    promise="plain",
    space=PLAIN.but(must_occur=("several ranks", "several units", "hsdp", "uneven-rows")),
)
def test_training_starts_from_the_parameters_of_the_model_that_was_given(case: TrainingCase, run: Run) -> None:
    """Before the first step every rank, of every replica, shows the parameters that the model had before sharding.

    Sees parameters that change while they are sharded, and replicas that start apart from one model.
    Not seen: how ranks that built different models would be made equal: here all build the same. features.broadcast
    sees that.
    Source: DeepSpeed#8277, offsets that overlapped in the flat buffer, found in review; DeepSpeed#1380.
    """
    assert_initial_equal(run(case), run.answer(case))


@law(
    "invariance.private-initial",
    promise="private",
    space=PRIVATE_UNCLIPPED.but(must_occur=("several ranks", "several units", "hsdp", "uneven-rows")),
)
def test_private_training_starts_from_the_parameters_of_the_model_that_was_given(case: TrainingCase, run: Run) -> None:
    """Before the first private step, too, every rank shows the parameters that the model had before sharding.

    Of a model that is made ready for per-sample clipping, which may replace or wrap its modules.
    Not seen: how ranks that built different models would be made equal, which features.broadcast sees.
    Source: DeepSpeed#8277, found in review; DeepSpeed#1380.
    """
    assert_initial_equal(run(case), run.answer(case))


@law(
    "invariance.world",
    promise="plain",
    space=PLAIN.but(must_occur=("distributed batch on several ranks",), vacuous_without=("non-zero gradient",)),
    takes=2,
)
def test_plain_training_is_the_same_on_any_number_of_ranks(case: TrainingCase, run: Run) -> None:
    """The same logical batch on another number of ranks, or of replicas, trains the same parameters, bit for bit.

    The loss carries the factor W and N grows with it, so that averages are exact on both.
    Not seen: what is wrong on every number of ranks alike (training.plain); more than six ranks on the other side.
    Source: torchtune#2172, torchtitan#2206.
    """
    _same(metamorphic.at_another_world_size(case, run.features), run, _WORLD)


@law(
    "invariance.private-world",
    promise="private",
    space=_PRIVATE.but(must_occur=("distributed batch on several ranks",), vacuous_without=("non-zero gradient",)),
    takes=2,
)
def test_private_training_is_the_same_on_any_number_of_ranks(case: TrainingCase, run: Run) -> None:
    """With per-sample clipping, the same logical batch on another number of ranks trains the same, bit for bit.

    Not seen: what is wrong on every number of ranks alike (training.private-unclipped); noise (noise.world).
    Source: Opacus#324, Opacus#761.
    """
    _same(metamorphic.at_another_world_size(case, run.features), run, _WORLD)


@law(
    "invariance.units",
    promise="plain",
    space=PLAIN.but(must_occur=("several ranks", "several units"), vacuous_without=("non-zero gradient",)),
)
def test_plain_training_is_the_same_for_any_units(case: TrainingCase, run: Run) -> None:
    """Layers grouped into other sharding units train the same parameters, bit for bit.

    Not seen: what any grouping does wrong alike; other groupings than all or nearly all layers in one, none, or one
    each.
    Source: bitsandbytes#2081, where a rule about a parameter's size was applied to the unit's.
    """
    _same(metamorphic.with_other_units(case, run.features), run, _UNITS)


@law(
    "invariance.private-units",
    promise="private",
    space=_PRIVATE.but(must_occur=("several ranks", "several units"), vacuous_without=("non-zero gradient",)),
)
def test_private_training_is_the_same_for_any_units(case: TrainingCase, run: Run) -> None:
    """With per-sample clipping, layers grouped into other sharding units train the same: a norm goes over all units.

    Not seen: what any grouping does wrong alike; units that are clipped apart, whose right answers differ.
    Source: torchtitan#766, fedbiomed#1443.
    """
    _same(metamorphic.with_other_units(case, run.features), run, _UNITS)


@law(
    "invariance.reshard",
    promise="plain",
    space=PLAIN.but(
        must_occur=("several ranks", "several units sharded over several ranks"), vacuous_without=("non-zero gradient",)
    ),
    needs_traits=("keep-unsharded",),
)
def test_plain_training_is_the_same_with_parameters_kept(case: TrainingCase, run: Run) -> None:
    """Whether parameters are freed after the forward, or kept for the backward, changes no bit.

    Not seen: whether anything is freed or kept at all (lifecycle.memory).
    Source: pytorch#83129.
    """
    _same(metamorphic.with_other_reshard(case, run.features), run, _RESHARD)


@law(
    "invariance.private-reshard",
    promise="private",
    space=_PRIVATE.but(
        must_occur=("several ranks", "several units sharded over several ranks"), vacuous_without=("non-zero gradient",)
    ),
    needs_traits=("keep-unsharded",),
)
def test_private_training_is_the_same_with_parameters_kept(case: TrainingCase, run: Run) -> None:
    """With per-sample clipping, freeing parameters after the forward or keeping them for both backwards changes no bit.

    Not seen: whether anything is freed or kept at all (lifecycle.gathered).
    Source: pytorch#83129.
    """
    _same(metamorphic.with_other_reshard(case, run.features), run, _RESHARD)


@law(
    "invariance.samples",
    promise="plain",
    space=PLAIN.but(must_occur=("distributed batch on several ranks",), vacuous_without=("non-zero gradient",)),
)
def test_plain_training_is_the_same_for_any_order_of_samples(case: TrainingCase, run: Run) -> None:
    """Each rank's samples in the opposite order, dealt out to micro-batches anew, train the same, bit for bit.

    Where each rank has one, they change ranks.
    Not seen: what every order of samples does wrong alike; orders other than the opposite one, and one rank further.
    Source: pytorch#25162.
    """
    _same(metamorphic.with_samples_reordered(case, run.features), run, _ORDER)


@law(
    "invariance.private-samples",
    promise="private",
    space=_PRIVATE.but(must_occur=("distributed batch on several ranks",), vacuous_without=("non-zero gradient",)),
)
def test_private_training_is_the_same_for_any_order_of_samples(case: TrainingCase, run: Run) -> None:
    """With per-sample clipping, samples in another order train the same: each sample keeps its own norm and factor.

    Not seen: what every order of samples does wrong alike (clipping.coefficients).
    Source: Opacus#650, where positions were taken for samples; Opacus#761.
    """
    _same(metamorphic.with_samples_reordered(case, run.features), run, _ORDER)


@law(
    "invariance.micro-batches",
    promise="plain",
    space=PLAIN.but(must_occur=("distributed batch on several ranks",), vacuous_without=("non-zero gradient",)),
    needs_traits=("micro-batches",),
)
def test_plain_training_is_the_same_in_any_number_of_micro_batches(case: TrainingCase, run: Run) -> None:
    """One micro-batch or several, gradients reduced after each or after the last, train the same, bit for bit.

    Not seen: what one micro-batch and several do wrong alike (training.plain).
    Source: mlx-lm#1413, pytorch#73535.
    """
    _same(metamorphic.with_other_micro_batches(case, run.features), run, _MICRO)


@law(
    "invariance.private-micro-batches",
    promise="private",
    space=_PRIVATE.but(must_occur=("distributed batch on several ranks",), vacuous_without=("non-zero gradient",)),
    needs_traits=("micro-batches",),
)
def test_private_training_is_the_same_in_any_number_of_micro_batches(case: TrainingCase, run: Run) -> None:
    """With per-sample clipping, one micro-batch or several train the same parameters, bit for bit.

    Not seen: what one micro-batch and several do wrong alike; noise (noise.micro-batches).
    Source: Safe-Synthesizer#518, Opacus#530.
    """
    _same(metamorphic.with_other_micro_batches(case, run.features), run, _MICRO)


@law(
    "invariance.repeated",
    promise="plain",
    space=REAL.but(must_occur=("several ranks", "several units", "sgd without weight decay")),
    observe=("grads",),
)
def test_a_case_run_twice_gives_the_same_bits(case: TrainingCase, run: Run) -> None:
    """The same case run twice, in one process, on real numbers, gives the same parameters and gradients, bit for bit.

    With SGD without weight decay the second time losses are doubled and the learning rate is halved, so that gradients
    are twice the first ones, and nothing else is another. Sees what outlives a training: a counter, a cache, gradients
    that are remembered, a buffer that is not cleared. Where parameters lie in memory at another alignment, kernels may
    round otherwise, and nothing is claimed.
    Not seen: what both runs do wrong alike; what a training of other inputs would leave behind.
    Source: fairscale#780.
    """
    halved = metamorphic.at_half_the_rate(case)
    if halved is None:
        _twice(case, run)
        return
    first, second = run(case), run(halved, loss_times=TWICE)
    require_same_placement(first, second)
    assert_same_in_doubled_losses(first, second)


@law(
    "invariance.private-repeated",
    promise="private",
    space=PRIVATE_PROBE.but(numbers="either", must_occur=("several ranks", "several units")),
)
def test_a_private_case_run_twice_gives_the_same_bits(case: TrainingCase, run: Run) -> None:
    """With per-sample clipping, the same case run twice in one process gives the same bits of everything shown.

    On integers where real numbers are not accepted.
    Not seen: what both runs do wrong alike; what another training, not the same one, would leave behind.
    Source: fairscale#780.
    """
    _twice(case, run)


def _twice(case: TrainingCase, run: Run) -> None:
    first, second = run(case), run(case)
    require_same_placement(first, second)
    assert_same_execution(first, second, partial(diagnosis.stale_state.repeated, first, second))
