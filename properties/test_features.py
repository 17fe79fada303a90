"""FSDP2 features: a training that uses one has the bits of one that does not, and the feature is in effect.

Each law runs a case with the feature and without it. It compares the run with the feature with the single device's
answer, and the two runs with each other: their collectives, when layers run between these, and how parameters lie. A
feature that does nothing is a finding too. So a feature that shows in what is gathered is asked on flat meshes only:
replicas of one shard gather nothing. In features.broadcast, which FSDP2 is not alone in having, ranks start from
unequal models, which shows its effect. In private training four features are asked: activation checkpointing,
compilation, broadcasting and ignored parameters. Not seen: how fast anything is, what streams of a GPU do.
"""

from __future__ import annotations

from dataclasses import replace

from fsdpcheck.adapters.contract import Features, Use
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase, Trait
from fsdpcheck.checks.features import (
    assert_in_effect,
    assert_right,
    assert_right_with,
    assert_same_collectives,
    backward_reads_units,
    has_slopes,
    in_effect,
)
from fsdpcheck.checks.initial_parameters import assert_computes_with_buffers_of_rank_0, assert_starts_from_rank_0
from fsdpcheck.errors import InvalidCase, NotApplicable, NotExact
from fsdpcheck.execution import Execution
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from fsdpcheck.program.probe import Probe
from fsdpcheck.strategies import EQUAL_BITS, PLAIN, BuiltSpace
from fsdpcheck.workload.models import parameter_shapes

_MICRO: tuple[Trait, ...] = ("micro-batches", "no-sync")
_FLAT_FREED = PLAIN.without("keep-unsharded", "hsdp")
"""On flat meshes, parameters freed after the forward."""


def _compiled_privately(features: Features, world_sizes: tuple[int, ...]) -> list[TrainingCase]:
    """Two small cases with an inner unit: of a Linear behind a Linear, and of one behind an Embedding."""
    world = 2 if 2 in world_sizes else min(world_sizes)
    mesh, unclipped = MeshSpec(world), StepSpec(clipping="unclipped", normaliser=2)
    linear = ModelSpec((LayerSpec(2, bias=True, activation="relu"), LayerSpec(1)), features=2, units=(1,))
    tokens = ModelSpec((LayerSpec(2, bias=True),), "tokens", features=2, length=2, vocabulary=3, units=(1,))
    cases = [TrainingCase(linear, mesh, BatchLayout("contiguous", 3), replace(unclipped, clipping="exact"))]
    if "tokens" in features.accepts:
        cases.append(TrainingCase(tokens, mesh, BatchLayout("contiguous", 3), unclipped))
    return cases


_COMPILED_PRIVATELY = BuiltSpace(
    build=_compiled_privately, words="two small private models with an inner unit", user_models="never"
)


def _each_its_own(case: TrainingCase) -> TrainingCase:
    """The case with a unit for every layer, where none is tied; a user's own model as it is."""
    spec = case.model
    if spec.own is not None or spec.tied is not None:
        return case
    return replace(case, model=replace(spec, units=(1,) * (len(spec.layers) + spec.has_front), bare_units=False))


def _accepted(case: TrainingCase, run: Run) -> TrainingCase:
    if unmet := case.requires() - run.features.accepts:
        raise NotApplicable(f"a case like this demands {', '.join(sorted(unmet))}")
    return case


def _several_micro_batches(case: TrainingCase, run: Run, sync_every: bool) -> TrainingCase:
    """The case in three micro-batches."""
    step = replace(case.step, reduction="sum").in_micro_batches(3, sync_every)
    return _accepted(replace(case, step=step), run)


def _in_replicas(case: TrainingCase, run: Run) -> TrainingCase:
    """The case with two replicas or more, if the number of ranks is no one."""
    ranks = case.world_size
    replicas = next((r for r in range(2, ranks + 1) if ranks % r == 0), 1)
    if replicas == 1:
        raise NotExact("one rank has no replicas")
    mesh = MeshSpec(ranks // replicas, replicas, case.mesh.reshard_after_forward)
    arithmetic = replace(case.arithmetic, averaging="divide")
    try:
        return _accepted(replace(case, mesh=mesh, arithmetic=arithmetic), run)
    except InvalidCase as error:
        raise NotExact(str(error)) from error


def _ran(case: TrainingCase, run: Run, use: Use) -> tuple[Execution, Execution]:
    """(without, with) the feature; the latter is right."""
    answer, observe = run.answer(case), run.features.observables & {"grads"}
    hooks = () if use == "compiled" else (probes.footprint,)  # they would be compiled too
    seen = (probes.set_up, *hooks)
    without = run(case, observe, probes=seen)
    assert_right(without, answer)
    using = run(case, observe, using=(use,), probes=seen)
    assert_right_with(use, using, answer)
    return without, using


def _starts_as_rank_0(case: TrainingCase, run: Run, gives: Probe) -> None:
    """Parameters and the buffers of the probe ``gives`` are rank 0's, and the training is the single device's."""
    answer, observe = run.answer(case), run.features.observables & {"grads"}
    using = run(case, observe, using=("broadcast",), probes=(probes.start_apart, gives))
    assert_starts_from_rank_0(using, answer)
    assert_computes_with_buffers_of_rank_0(using, answer, gives)
    assert_right(using, answer)


def _unnoticed(case: TrainingCase, run: Run, use: Use) -> None:
    """The feature changes no bit, and is in effect."""
    assert_in_effect(*_ran(case, run, use), use)


@law(
    "features.unshard",
    promise="features.unshard",
    space=_FLAT_FREED.but(
        ranks=2, must_occur=("several units sharded over several ranks",), vacuous_without=("non-zero gradient",)
    ),
)
def test_gathering_units_by_hand_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """With every unit gathered before the forward, asynchronously and waited for, training is the single device's.

    Not seen: whether a gather overlaps with anything; a model without inner units.
    Source: ``FSDPModule.unshard``; pytorch#164756, where gathers that were asked for came at other times.
    """
    case = _each_its_own(case)
    if not case.model.unit_count:
        raise NotExact("no unit is gathered before its turn")
    _unnoticed(case, run, "unshard")


@law(
    "features.prefetch",
    promise="features.prefetch",
    space=_FLAT_FREED.but(
        ranks=2, must_occur=("several units sharded over several ranks",), vacuous_without=("non-zero gradient",)
    ),
)
def test_gathering_units_ahead_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """With each unit gathering the two after it, in the forward and in the backward, training is the single device's.

    A unit that computes must not wait for, or free, what was gathered for another.
    Not seen: whether a gather overlaps with anything; other numbers of units ahead than two.
    Source: FSDPModule's ``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``;
    ROCm/pytorch#3501.
    """
    case = _each_its_own(case)
    if case.model.unit_count < 2:
        raise NotExact("no unit comes after the first")
    _unnoticed(case, run, "prefetch")


@law(
    "features.some-sync",
    promise="features.some-sync",
    space=PLAIN.without("mean").but(ranks=2, vacuous_without=("non-zero gradient",)),
    needs_traits=_MICRO,
)
def test_reducing_some_micro_batches_loses_no_gradient(case: TrainingCase, run: Run) -> None:
    """Reduced after the first of three micro-batches, not after the second, and after the third, nothing is lost.

    Not seen: other patterns than this one; losses that are means.
    Source: pytorch#73535, pytorch#90546, where shards that were reduced already were dropped.
    """
    _unnoticed(_several_micro_batches(case, run, False), run, "some-sync")


@law(
    "features.late-all-reduce",
    promise="features.late-all-reduce",
    space=PLAIN.without("mean", "hsdp").but(ranks=2, vacuous_without=("non-zero gradient",)),
    needs_traits=("hsdp", "micro-batches"),
)
def test_reducing_over_replicas_at_the_last_micro_batch_loses_no_gradient(case: TrainingCase, run: Run) -> None:
    """Reduce-scattered after each micro-batch and all-reduced over replicas after the last, nothing is lost.

    Not seen: other numbers of micro-batches than three; losses that are means.
    Source: ``FSDPModule.set_requires_all_reduce``; pytorch#90546.
    """
    _unnoticed(_in_replicas(_several_micro_batches(case, run, True), run), run, "late-all-reduce")


@law(
    "features.divide-factor",
    promise="features.divide-factor",
    space=PLAIN.without("float32", "hsdp").but(ranks=2, vacuous_without=("non-zero gradient",)),
)
def test_another_divisor_divides_once(case: TrainingCase, run: Run) -> None:
    """With twice the divisor and twice the losses, training is the single device's.

    In float64: float32 is multiplied by its inverse inside the collective, which only NCCL can. On flat meshes: see
    docs/findings.md for replicas of one shard.
    Not seen: float32, replicas, and other divisors than twice the number of ranks.
    Source: ``FSDPModule.set_gradient_divide_factor``; fairscale#565, pytorch#83665.
    """
    without, using = _ran(case, run, "divide-factor")
    if not has_slopes(without):
        raise NotExact("the losses have no slope, so nothing is divided")
    assert_in_effect(without, using, "divide-factor")


@law(
    "features.no-gather",
    promise="features.no-gather",
    space=PLAIN.without("keep-unsharded", "hsdp", "tied", "conv", "bags").but(
        ranks=2, user_models="never", vacuous_without=("non-zero gradient",)
    ),
    needs_traits=("tokens",),
)
def test_an_embedding_that_is_not_gathered_for_its_backward_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """A unit whose backward needs no weight may stay sharded in it.

    Not seen: units that are kept after the forward, wholly or over fewer ranks (pytorch#144800); other layers than
    Embeddings.
    Source: ``FSDPModule.set_unshard_in_backward``; no public report known.
    """
    if case.model.input != "tokens":
        raise NotExact("the model has no Embedding")
    _unnoticed(_each_its_own(case), run, "no-gather")


@law(
    "features.checkpointing",
    promise="features.checkpointing",
    space=EQUAL_BITS.but(must_occur=("several ranks", "several units"), vacuous_without=("non-zero gradient",)),
)
def test_computing_units_again_in_the_backward_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """With activation checkpointing inside each unit, training is the single device's; private training too.

    A backward may need nothing that is computed again, with bookkeeping or behind frozen units; of such a case nothing
    is claimed.
    Not seen: how much memory it saves; layers that draw random numbers, which no case has.
    Source: pytorch#82203, where the recomputation saw parameters that had been freed; fairscale#780.
    """
    if not backward_reads_units(case, run.answer(case)):
        raise NotExact("the backward reads nothing that a unit's forward has kept")
    without, using = _ran(case, run, "checkpointing")
    if case.step.private and not in_effect(without, using, "checkpointing"):
        raise NotExact("the private backward needs nothing that is computed again")
    assert_in_effect(without, using, "checkpointing")


@law(
    "features.meta",
    promise="features.meta",
    space=PLAIN.without("tied").but(ranks=2, vacuous_without=("non-zero gradient",)),
)
def test_a_model_sharded_on_the_meta_device_and_filled_later_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """Sharded without memory, given it and filled, the model starts and trains as one that was filled before.

    Not seen: what ranks would draw for themselves (torchtitan#166): all are filled with the values of one model;
    buffers.
    Source: pytorch#90465, Megatron-LM#6799; claim D7 of docs/claims.md.
    """
    _unnoticed(case, run, "meta")


@law(
    "features.state-dict",
    promise="features.state-dict",
    space=PLAIN.but(ranks=2, vacuous_without=("non-zero gradient",)),
)
def test_parameters_come_back_from_a_full_state_dict(case: TrainingCase, run: Run) -> None:
    """Taken out whole after each step, spoilt, and brought back from rank 0's copy, parameters have the same bits.

    Not seen: the optimizer's state, and what lies in files (chapter on state).
    Source: DeepSpeed#1380.
    """
    _unnoticed(case, run, "state-dict")


@law(
    "features.ignored",
    promise="features.ignored",
    space=EQUAL_BITS.but(ranks=2, must_occur=("several units",), vacuous_without=("non-zero gradient",)),
)
def test_an_ignored_parameter_is_left_alone(case: TrainingCase, run: Run) -> None:
    """A parameter left out of sharding stays whole, and its gradient is averaged once, by its user if by nobody else.

    Private training too, where it is promised: the parameter counts in norms and is clipped like the others.
    Not seen: a user of ``fully_shard`` who forgets that average (pytorch#98281), for here it is made; replicas of one
    shard, where it is what the unit's all-reduce would be; more than one such parameter.
    Source: ``fully_shard(ignored_params=...)``; pytorch#104258, where units inside others sharded what was to be
    ignored.
    """
    if case.mesh.dp_shard == 1:
        raise NotExact("no parameter is sharded")
    _unnoticed(case, run, "ignored")


@law(
    "features.columns",
    promise="features.columns",
    space=PLAIN.without("uneven-rows", "rows<ranks").but(ranks=2, vacuous_without=("non-zero gradient",)),
)
def test_sharding_weights_on_their_second_dimension_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """Weights whose second dimension the ranks divide are sharded on it, and training is the single device's.

    Not seen: dimensions that the ranks do not divide, which ``fully_shard`` refuses; private training.
    Source: ``fully_shard(shard_placement_fn=...)``; no public report known.
    """
    if case.mesh.dp_shard < 2 or not any(
        len(s) > 1 and s[1] % case.mesh.dp_shard == 0 for s in parameter_shapes(case).values()
    ):
        raise NotExact("no second dimension is divided by the number of ranks")
    without, using = _ran(case, run, "columns")
    assert_in_effect(without, using, "columns")


@law(
    "features.compiled",
    promise="features.compiled",
    space=PLAIN.without("surrogates").but(
        most_ranks=3, must_occur=("several ranks",), vacuous_without=("non-zero gradient",)
    ),
)
def test_compiled_units_change_no_bit(case: TrainingCase, run: Run) -> None:
    """With the forward of each unit traced by torch.compile and run as traced, training is the single device's.

    Collectives are those of the units as they are, in their order. Compiled by a backend that generates no code. At
    least one graph is.
    Not seen: private steps (features.private-compiled); more than three ranks, where fewer are asked for; what
    generated code computes, and which operators a backend fuses.
    Source: pytorch#184113, gradients that changed when the forward was traced; claim D13 of docs/claims.md.
    """
    without, using = _ran(_each_its_own(case), run, "compiled")
    assert_same_collectives(without, using, "compiled")
    assert_in_effect(without, using, "compiled")


@law(
    "features.private-compiled",
    promise="features.compiled",
    space=_COMPILED_PRIVATELY.but(must_occur=("several ranks",), vacuous_without=("clipped sample",)),
    needs_promises=("exact-factors",),
    needs_traits=("ragged", "bias", "root-parameters"),
)
def test_compiled_units_change_no_bit_of_a_private_step(case: TrainingCase, run: Run) -> None:
    """With the forward of each unit traced by torch.compile, one private step on few ranks is the single device's.

    Norms, which hooks inside the units see, count as those of a unit as it is; collectives are the same. At least one
    graph is compiled.
    Not seen: all but two small models, since hooks break a unit into so many graphs that a case takes seconds.
    Source: pytorch#184113, gradients that changed when the forward was traced; claim D13 of docs/claims.md.
    """
    without, using = _ran(_accepted(case, run), run, "compiled")
    assert_same_collectives(without, using, "compiled")
    assert_in_effect(without, using, "compiled")


@law(
    "features.bare-root",
    promise="features.bare-root",
    space=_FLAT_FREED.but(
        ranks=2, user_models="never", must_occur=("several units",), vacuous_without=("non-zero gradient",)
    ),
)
def test_a_root_without_parameters_changes_no_bit(case: TrainingCase, run: Run) -> None:
    """What inner units leave is a unit of several modules, and the root has no parameters.

    Not seen: a user's own model, for who calls its modules outside the units is not known.
    Source: pytorch#83129.
    """
    _unnoticed(case, run, "bare-root")


@law(
    "features.broadcast",
    promise="features.broadcast",
    space=EQUAL_BITS.but(
        ranks=2,
        must_occur=("several units", "hsdp", "replicas of several shards", "frozen"),
        vacuous_without=("non-zero gradient",),
    ),
)
def test_ranks_that_built_other_models_all_start_from_rank_0s(case: TrainingCase, run: Run) -> None:
    """Every rank builds its model with other values, all start from rank 0's, and training is the single device's.

    Sees ranks, replicas, units, single parameters or buffers that keep what they have built; no element is built alike
    by two ranks. The model, and each unit of a drawn one, has a buffer that a state dict has, and its forward needs it.
    Private training too.
    Not seen: buffers that no state dict has (features.broadcast-buffers); a user model's own, which are built alike.
    Source: torchtitan#166; pytorch#178569, buffers that did not reach other replicas; accelerate#3921; claim D14 of
    docs/claims.md.
    """
    _starts_as_rank_0(case, run, probes.persistent_buffers)


@law(
    "features.broadcast-buffers",
    promise="features.broadcast-buffers",
    space=EQUAL_BITS.but(
        ranks=2, must_occur=("several units", "replicas of several shards"), vacuous_without=("non-zero gradient",)
    ),
)
def test_buffers_that_no_state_dict_has_start_as_rank_0s_too(case: TrainingCase, run: Run) -> None:
    """Every rank builds non-persistent buffers of other values, and all compute with rank 0's, as a single device.

    As features.broadcast, of buffers with ``persistent=False``, such as frequencies of rotary embeddings: who fills a
    model from a state dict leaves them.
    Not seen: a user model's own, which are built alike; buffers that a forward changes, or that have no memory yet.
    Source: LlamaFactory#10820, lmms-engine#185, where ranks other than 0 kept what lay in memory.
    """
    _starts_as_rank_0(case, run, probes.non_persistent_buffers)


@law(
    "features.groups-of-two",
    promise="features.groups-of-two",
    space=_FLAT_FREED.but(
        worlds=(4, 6), ranks=2, must_occur=("several units",), vacuous_without=("non-zero gradient",)
    ),
    takes=4,
)
def test_parameters_kept_over_pairs_of_ranks_change_no_bit(case: TrainingCase, run: Run) -> None:
    """Sharded over pairs of ranks between forward and backward, gathered from there, training is the single device's.

    Not seen: groups of another size; replicas.
    Source: ``fully_shard(reshard_after_forward=2)``; ZeRO++, arXiv:2306.10209, and DeepSpeed#4851, DeepSpeed#7606.
    """
    case = _each_its_own(case)
    if not case.model.unit_count:
        raise NotExact("no unit is freed after its forward")
    _unnoticed(case, run, "groups-of-two")
