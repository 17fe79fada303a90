"""State: a training that is saved and goes on elsewhere is the one that never stopped.

Each step but the first is taken by a new trainer, which has read what was saved after the step before.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory

from fsdpcheck.adapters.contract import Observable
from fsdpcheck.case import TrainingCase
from fsdpcheck.checks._read import completed
from fsdpcheck.checks.noise import noisy, standing
from fsdpcheck.checks.state import assert_readable, assert_resumed, assert_stored, going_on
from fsdpcheck.judging.registry import law
from fsdpcheck.judging.run import Run
from fsdpcheck.processes import leftovers
from fsdpcheck.strategies import EQUAL_BITS, PRIVATE_EXACT, metamorphic


def _observed(run: Run) -> frozenset[Observable]:
    return run.features.observables & {"grads"}


def _assert_same_after_stops(case: TrainingCase, run: Run, what: str) -> None:
    answer, observe = run.answer(case), _observed(run)
    never = run(case, observe=observe)
    with TemporaryDirectory(prefix=leftovers.folder_prefix()) as folder:
        stopped = run(case, observe=observe, save_to=folder, load_from=folder)
    assert_resumed((never, answer), (stopped, answer), what)


@law(
    "state.resumed",
    promise="state",
    space=EQUAL_BITS.but(
        adjusted=("grouped", "evaluated at times"),
        must_occur=("several ranks", "momentum", "adam", "unit-groups", "evaluation"),
        vacuous_without=("non-zero gradient",),
    ),
)
def test_a_training_that_stopped_goes_on_as_if_it_had_not(case: TrainingCase, run: Run) -> None:
    """Saved after each step and taken on by a new trainer, a training has the bits of one that never stopped.

    Parameters, momentum, moments, step counters, a halving learning rate and the options of each group of parameters.
    Where a case evaluates, the new trainer does so once before it loads, too: what is gathered then is not used after.
    Not seen: the sampler, which is its user's; what both trainings do wrong alike.
    Source: AReaL#1468, where moments were dropped without a word; pytorch#117421, a load that changed no output;
    pytorch#147730, groups of parameters.
    """
    _assert_same_after_stops(going_on(case, run.features), run, "training that stopped went on otherwise")


@law(
    "state.noise",
    promise="state",
    space=PRIVATE_EXACT.but(must_occur=("several ranks",)),
    observe=("grads",),
    needs_promises=("noise-of-seed",),
)
def test_a_training_that_stopped_uses_no_noise_twice(case: TrainingCase, run: Run) -> None:
    """The noise after a stop is that of the next step, not that of the first one over again.

    Asked of an adapter that promises noise too.
    Not seen: noise that is wrong in a training that never stops (chapter on noise); the accountant (privacy.accounted).
    Source: jax#3646, one key for several draws.
    """
    private = noisy(going_on(case, run.features))
    _assert_same_after_stops(private, run, "noise after a stop is not that of the next step")


@law(
    "state.resharded",
    promise="resharded",
    space=EQUAL_BITS.but(
        adjusted=("rows for many",), must_occur=("several ranks",), vacuous_without=("non-zero gradient",)
    ),
    takes=2,
)
def test_a_training_goes_on_at_another_number_of_ranks(case: TrainingCase, run: Run) -> None:
    """Saved at W ranks and loaded at W', it has the parameters that were saved, and the bits of one that stayed at W.

    Either may be as many as 16. With noise too, where that is a function of the seed, at a rate that moves no
    parameter. With any replicas.
    Not seen: more than 16 ranks, and pairs whose least common multiple is above 48, as of 5 and 16.
    Source: Fast-LLM#436, Lightning#16815, torchtitan#1136; DeepSpeed#8452, files in the order of their names.
    """
    case = going_on(case, run.features)
    if case.step.clipping == "exact" and "noise-of-seed" in run.features.promises and "project" in run.features.accepts:
        case = standing(noisy(case), case.step.steps)  # what noise has moved has sums that round
    one, two = metamorphic.for_resharding(case, run.features)
    observe = _observed(run)
    with TemporaryDirectory(prefix=leftovers.folder_prefix()) as folder:
        completed(first := run(one, observe=observe, save_to=folder))
        second = run(two, observe=observe, load_from=folder)
    what = "training goes on otherwise at another number of ranks"
    assert_resumed((first, run.answer(one)), (second, run.answer(two)), what)


@law(
    "state.readable",
    promise="readable",
    space=EQUAL_BITS.but(must_occur=("several ranks", "uneven-rows", "frozen")),
)
def test_an_ordinary_model_is_filled_from_a_checkpoint(case: TrainingCase, run: Run) -> None:
    """A model that no rank shards, filled from a checkpoint, has the parameters that were trained, bit for bit.

    Frozen ones too, and tied ones. What fills it is what a user of the implementation would take, to export a model.
    Not seen: buffers; what else lies in the checkpoint (state.shape).
    Source: DeepSpeed#5439, DeepSpeed#1896.
    """
    case = replace(case, step=case.step.of_steps(1))
    with TemporaryDirectory(prefix=leftovers.folder_prefix()) as folder:
        saved = run(case, save_to=folder), run.answer(case)
        assert_readable(saved, partial(run.read, f"{folder}/0", case), 0)


@law(
    "state.shape",
    promise="stored",
    space=EQUAL_BITS.but(must_occur=("several ranks", "uneven-rows", "momentum")),
)
def test_a_checkpoint_holds_each_parameter_once_and_no_padding(case: TrainingCase, run: Run) -> None:
    """Every parameter lies in it under its own name and shape, each element once.

    Padding is in no file, of moments neither: no state has more elements than its parameter.
    Not seen: what is stored in no tensor; whether an ordinary model is filled from it (state.readable).
    Source: DeepSpeed#1380, torchtitan#1136.
    """
    case = replace(case, step=case.step.of_steps(1))
    with TemporaryDirectory(prefix=leftovers.folder_prefix()) as folder:
        completed(execution := run(case, save_to=folder))
        assert_stored(execution, run.stored(f"{folder}/0"), 0)
