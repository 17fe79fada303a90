"""A law that looks at moments holds of no adapter that leaves one out: it says which, where, and what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fsdpcheck import cli
from fsdpcheck.adapters.vocabulary import MOMENTS, PROMISES
from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.checks.lifecycle import assert_aliased
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import USAGE, AdapterError
from fsdpcheck.judging.check import check_case
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import probes
from tests.common.tables import each
from tests.toys import silent

TOY = str(Path(silent.__file__))
PLAIN = TrainingCase(
    ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=2, units=(1,)),
    MeshSpec(2),
    BatchLayout("contiguous", 4),
    StepSpec(steps=2, micro_batches=2, normaliser=4),
)
PRIVATE = replace(PLAIN, step=replace(PLAIN.step, clipping="exact"))
CLIPPED = replace(PLAIN, step=replace(PLAIN.step, max_grad_norm=0.5))
ALONE = replace(PRIVATE, mesh=MeshSpec(1))

OF_PADDING = {"after_reduce", "before_step"}
LAWS: dict[str, tuple[TrainingCase, set[str]]] = {
    "padding.zero": (PLAIN, OF_PADDING),
    "padding.unread": (PLAIN, OF_PADDING),
    "padding.unread-global-norm": (CLIPPED, OF_PADDING),
    "noise.padding": (PRIVATE, OF_PADDING),
    "lifecycle.gathered": (PRIVATE, set(MOMENTS)),
    "lifecycle.aliased": (ALONE, set(MOMENTS)),
    "lifecycle.released": (PRIVATE, set()),
    "training.plain": (PLAIN, set()),
}
"""A law -> a case it is judged on, and the moments without which it holds of nothing."""


def judged(engine: SimulatedEngine, law: str, adapter: str, case: TrainingCase | None = None) -> str:
    """What becomes of a law on one case: its status, or what is said of a moment that is missing."""
    run = Run(engine, adapter if adapter == "reference" else f"{TOY}:{adapter}")
    try:
        return check_case(chapters()[law], run, case or LAWS[law][0], diagnose=False).status
    except AdapterError as error:
        return str(error)


LOOKED_AT = [(law, moment) for law, (_, needed) in LAWS.items() for moment in MOMENTS if moment in needed]
OTHERS = [(law, moment) for law in LAWS for moment in MOMENTS if (law, moment) not in LOOKED_AT]


@each(("law", "moment"), LOOKED_AT)
def test_a_moment_at_which_a_law_looks_has_to_be_announced(engine: SimulatedEngine, law: str, moment: str) -> None:
    said, case = judged(engine, law, moment), LAWS[law][0]
    wanted = 1 if moment in ("before_step", "after_norms") else case.step.micro_batches
    for line in (
        f"adapter '{TOY}:{moment}' does not announce every moment",
        f"got     announcements of {moment}: 0; in the whole run this rank announced after_init, ",
        f"wanted  announcements of {moment}: {wanted} or more",
        "where   step 0, rank 0",
        f"next    call setup.notify('{moment}', trainer) there",
    ):
        assert line in said


OTHERS_BY_DAY = [pair for pair in OTHERS if ([*LAWS].index(pair[0]) + [*MOMENTS].index(pair[1])) % 3 == 0]
"""Every law of which there is a pair, and every moment."""


@pytest.mark.parametrize("pairs", [OTHERS_BY_DAY, pytest.param(OTHERS, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_a_moment_at_which_no_law_looks_may_be_left_out(engine: SimulatedEngine, pairs: list[tuple[str, str]]) -> None:
    assert [{of[place] for of in pairs} for place in (0, 1)] == [{of[place] for of in OTHERS} for place in (0, 1)]
    assert {(law, moment, judged(engine, law, moment)) for law, moment in pairs} == {(*pair, "holds") for pair in pairs}


@pytest.mark.parametrize("law", LAWS)
def test_who_announces_nothing_holds_only_where_nothing_is_needed(engine: SimulatedEngine, law: str) -> None:
    said = judged(engine, law, "nothing")
    assert said == "holds" if not LAWS[law][1] else "this rank announced after_init, after_step\n" in said
    assert judged(engine, law, "reference") == "holds"


@pytest.mark.parametrize(
    ("adapter", "got", "where"),
    [
        ("in_the_last_step", "before_step: 0", "step 1, rank 0"),
        ("on_one_rank", "before_step: 0", "step 0, rank 1"),
        ("OncePerStep", "after_reduce: 1", "step 0, rank 0"),
    ],
)
def test_every_step_micro_batch_and_rank_is_asked_for(
    engine: SimulatedEngine, adapter: str, got: str, where: str
) -> None:
    said = judged(engine, "padding.zero", adapter)
    assert f"got     announcements of {got};" in said
    assert f"where   {where}" in said


@pytest.mark.parametrize("law", [law for law, (_, moments) in LAWS.items() if moments == OF_PADDING])
def test_who_shows_no_gradient_at_these_moments_does_not_hold(engine: SimulatedEngine, law: str) -> None:
    """The padding of a gradient is what an optimizer makes padding of parameters of."""
    said = judged(engine, law, "WithoutGradients")
    for line in (
        "does not show the gradient of every shard that is trained",
        "got     gradients of [] elements, from shards()",
        "wanted  of [",
        "where   at after_reduce, step 0, rank ",
        "next    show each reduced gradient as Shard(..., holds='gradient')",
    ):
        assert line in said


@pytest.mark.parametrize("adapter", ["WithoutOneGradient", "WithNone"])
def test_a_gradient_that_is_missing_is_a_finding(engine: SimulatedEngine, adapter: str) -> None:
    case, run = LAWS["padding.zero"][0], Run(engine, f"{TOY}:{adapter}")
    for law in ("padding.zero", "padding.unread"):
        found = check_case(chapters()[law], run, case, diagnose=False).finding
        assert found is not None
        assert found.what == "the gradient of a shard that is trained is missing"
        assert found.where == "at after_reduce, step 0, rank 0"
    assert judged(engine, "shards.cover", adapter, case) == "holds"


def test_micro_batches_that_are_reduced_together_have_one_reduction(engine: SimulatedEngine) -> None:
    together = replace(PLAIN, step=replace(PLAIN.step, sync_every=False))
    assert judged(engine, "padding.zero", "OncePerStep", together) == "holds"


def test_a_plain_step_has_no_moments_of_norms(engine: SimulatedEngine) -> None:
    for moment in ("after_norms", "after_first_backward"):
        assert judged(engine, "lifecycle.gathered", moment, PLAIN) == "holds"


def test_what_the_harness_itself_did_not_see_is_its_own_error(engine: SimulatedEngine) -> None:
    seen = Run(engine, "reference")(ALONE, probes=(probes.units,))
    assert_aliased(seen)
    own = seen.ranks[0].observations
    for lost in ("after_init", "after_step"):
        seen.ranks[0].observations = [entry for entry in own if entry[1] != lost]
        with pytest.raises(AdapterError, match=f"(?s)of {lost}: 0.*an error of fsdpcheck"):
            assert_aliased(seen)


@pytest.mark.nightly
def test_a_run_ends_in_an_error_of_the_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that could be taken for a pass: exit code 2."""
    asked = ("run", "--adapter", f"{TOY}:nothing", "--law", "padding.zero,lifecycle.gathered", "--world-size", "2")
    assert cli.main(list(asked)) == USAGE
    said = capsys.readouterr().out
    assert "ERROR: lifecycle.gathered" in said
    assert "does not announce every moment at which a law that it promises looks" in said
    assert "0 checks hold, 0 findings, 2 error; 0 distinct cases judged" in said


def test_promises_of_padding_and_of_a_unit_s_life_need_moments() -> None:
    needing = {promise: row.moments for promise, row in PROMISES.items() if row.moments}
    assert {promise: set(moments) for promise, moments in needing.items()} == {
        **dict.fromkeys(("padding.zero", "padding.unread", "noise"), OF_PADDING),
        "lifecycle": set(MOMENTS),
    }
