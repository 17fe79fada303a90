"""Laws on a user's own model from the command line: held, broken, replayed, refused."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdpcheck import cli
from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, TrainingCase, UserModelSpec
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import InvalidToken
from fsdpcheck.findings import tokens
from fsdpcheck.judging.check import check_case, check_law
from fsdpcheck.judging.coverage import Limits
from fsdpcheck.judging.exploration import Exploration, Rejected
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.judging.tally import Tally
from fsdpcheck.workload.user_model import inspection

TOYS = str(Path(__file__).parents[1] / "toys" / "own_models.py")


def _run(tmp_path: Path, *arguments: str, build: str = "right") -> tuple[int, dict[str, object]]:
    report = tmp_path / "report.json"
    own = ["--model", f"{TOYS}:{build}", "--batch", f"{TOYS}:batch"]
    code = cli.main(["run", *own, "--world-size", "2", "--no-confirm", "--json", str(report), *arguments])
    return code, json.loads(report.read_text())


@pytest.mark.nightly
def test_laws_hold_on_a_users_model(tmp_path: Path) -> None:
    code, data = _run(tmp_path, "--adapter", "fully_shard", "--law", "training.plain")
    (verdict,) = data["verdicts"]  # type: ignore[misc]
    assert (code, verdict["status"]) == (0, "holds")
    assert verdict["cases"] == verdict["census"]["tier exact"] > 5


@pytest.mark.parametrize("adapter", ["fully_shard", "reference"])
def test_units_that_are_computed_again_may_take_inputs_by_keyword(adapter: str, engine: SimulatedEngine) -> None:
    own = inspection.inspect(f"{TOYS}:named_inputs", f"{TOYS}:batch").own
    assert own.units == ("blocks.0", "blocks.1")
    run = Run(engine, adapter, own=own)
    verdict = check_law(chapters()["features.checkpointing"], run, world_sizes=(2,), most=2)
    assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")


def test_a_table_in_a_buffer_that_leaves_no_case_is_named_beside_the_line_that_is_refused(
    engine: SimulatedEngine,
) -> None:
    own = inspection.inspect(f"{TOYS}:tabled", f"{TOYS}:batch").own
    verdict = check_law(chapters()["training.plain"], Run(engine, "ddp", own=own), world_sizes=(2,))
    assert (verdict.status, verdict.cases) == ("no case", 0)
    assert re.search(
        rf"; in module blocks\.0\.0 \(Linear\), at {re.escape(TOYS)}:\d+; buffers keep their", verdict.reason
    )
    assert "those of front.0.cos are no short numbers" in verdict.reason
    assert ".mask" not in verdict.reason


def test_laws_hold_on_models_that_name_a_dtype(engine: SimulatedEngine) -> None:
    """In float64 plain PyTorch raises on the second, as ranks would."""
    for build, law in (("autocast", "training.plain"), ("to_float32", "rounding.gradients")):
        seen = inspection.inspect(f"{TOYS}:{build}", f"{TOYS}:batch")
        run = Run(engine, "fully_shard").of(seen, law.startswith("rounding"))
        verdict = check_law(chapters()[law], run, world_sizes=(2,), most=2)
        assert (verdict.status, verdict.cases, verdict.reason) == ("holds", 2, "")
        assert verdict.census["float32"] == 2


def test_what_a_single_device_raises_too_is_no_finding(engine: SimulatedEngine) -> None:
    own = inspection.inspect(f"{TOYS}:right", f"{TOYS}:batch").own
    raising = replace(own, build=f"{TOYS}:on_five")
    layout = BatchLayout("contiguous", 10)
    case = TrainingCase(
        ModelSpec((), own=raising), MeshSpec(2), layout, arithmetic=Arithmetic(project=False, numbers="real")
    )
    verdict = check_case(chapters()["rounding.gradients"], Run(engine, "fully_shard", own=raising), case)
    assert (verdict.status, verdict.exit_code) == ("not supported", 2)
    assert "your model raises on a single device too" in verdict.reason
    assert "got     ValueError: five at once" in verdict.reason
    assert "module model.front.0 (Calls)" in verdict.reason


def test_a_model_that_mixes_samples_is_no_finding(engine: SimulatedEngine) -> None:
    """Where the inspection saw nothing, as with weights that hide it: what would be a finding is looked at again."""
    own, law = inspection.inspect(f"{TOYS}:right", f"{TOYS}:batch").own, chapters()["training.plain"]
    case = TrainingCase(
        ModelSpec((), own=own), MeshSpec(2), BatchLayout("contiguous", 8), arithmetic=Arithmetic(project=False)
    )
    for build in ("divided", "every_third"):
        mixing = replace(own, build=f"{TOYS}:{build}")
        verdict = check_case(
            law, Run(engine, "fully_shard", own=mixing), replace(case, model=ModelSpec((), own=mixing))
        )
        assert (verdict.status, verdict.exit_code) == ("not supported", 2), verdict.reason
        assert "your model mixes samples: what it gives for one depends on how many" in verdict.reason
        assert re.search(
            r"sample \d of step 0: an entry of the gradient of \S+ is \S+ alone, \S+ among", verdict.reason
        )
    run = Run(engine, "fully_shard", own=mixing)
    tally = Tally(Limits(run.features.accepts, (2,), frozenset(), True))
    drawn = Exploration(law, run.watching(law.observe), tally, (2,))
    with pytest.raises(Rejected):  # another case is judged in its place
        drawn.judge(replace(case, model=ModelSpec((), own=mixing)))
    assert (drawn.broken, len(tally.refused)) == (None, 1)
    wrong = Run(engine, "reference", ("fsdpcheck.impl.faults:averaged_twice",), own=own)
    assert check_case(law, wrong, case, diagnose=False).status == "finding"


def test_laws_that_need_a_large_model_are_not_asked_of_a_users_small_one(tmp_path: Path) -> None:
    _, data = _run(tmp_path, "--adapter", "reference", "--law", "noise.scale", "--law", "noise.independent")
    verdicts = data["verdicts"]
    assert [verdict["status"] for verdict in verdicts] == ["not promised"] * 2  # type: ignore[attr-defined]
    assert all("models of its own" in verdict["reason"] for verdict in verdicts)  # type: ignore[attr-defined]


def test_laws_hold_on_a_users_weights(tmp_path: Path) -> None:
    code, data = _run(tmp_path, "--adapter", "fully_shard", "--real")
    assert code == 0
    judged = [verdict for verdict in data["verdicts"] if verdict["status"] == "holds"]  # type: ignore[attr-defined]
    assert {verdict["law"] for verdict in judged} >= {"rounding.gradients", "rounding.update"}
    assert all(verdict["census"]["tier replay"] == verdict["cases"] for verdict in judged)


def test_what_the_import_of_a_users_model_sets_is_told_with_the_verdict(
    ranks_here: InProcessEngine, tmp_path: Path
) -> None:
    """And it is in place where its ranks run alone."""
    (tmp_path / "mine.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.float64)\ntorch.autograd.set_detect_anomaly(True)\nSEEN = set()\n"
        "class Net(torch.nn.Linear):\n    def forward(self, x):\n"
        "        SEEN.add((torch.get_default_dtype(), torch.is_anomaly_enabled()))\n        return super().forward(x)\n"
        "def build():\n    return Net(3, 2)\n"
        "def batch(n):\n    return torch.randn(n, 3), torch.randn(n, 2)\n"
    )
    file = f"{tmp_path / 'mine.py'}"
    own = inspection.inspect(f"{file}:build", f"{file}:batch").own
    seen = next(module.SEEN for module in list(sys.modules.values()) if getattr(module, "__file__", "") == file)
    assert seen == {(torch.float32, False)}
    verdict = check_law(chapters()["training.plain"], Run(ranks_here, "fully_shard", own=own), world_sizes=(2,), most=1)
    assert seen == {(torch.float32, False), (torch.float64, True)}
    for what in ("torch.get_default_dtype() at torch.float64 (was torch.float32)", "torch.is_anomaly_enabled() on"):
        assert f"importing {file} left {what}: in place on ranks, and not where they are judged" in verdict.left
    assert (torch.get_default_dtype(), torch.is_anomaly_enabled()) == (torch.float32, False)


@pytest.mark.parametrize(
    "tier",
    [
        pytest.param(["--law", "training.plain"], marks=pytest.mark.nightly),
        pytest.param(["--real", "--law", "rounding.gradients"], marks=pytest.mark.nightly),
    ],
)
def test_a_planted_fault_is_found_on_a_users_model_and_replayed(
    tier: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = _run(tmp_path, "--adapter", "reference", "--install", "averaged_twice", *tier)
    assert code == 1
    (verdict,) = data["verdicts"]  # type: ignore[misc]
    token = verdict["finding"]["token"]
    assert "--model" in capsys.readouterr().out
    assert cli.main(["replay", token]) == 2
    assert "nothing was imported" in capsys.readouterr().err
    assert cli.main(["replay", token, "--model", f"{TOYS}:right"]) == 2
    assert "repeat it: --batch" in capsys.readouterr().err
    assert cli.main(["replay", token, "--model", f"{TOYS}:right", "--batch", f"{TOYS}:batch"]) == 1


@pytest.mark.nightly
def test_a_law_that_can_judge_no_case_says_why_and_offers_the_next_tier(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = _run(tmp_path, "--adapter", "fully_shard", "--law", "training.plain", build="untaught")
    (verdict,) = data["verdicts"]  # type: ignore[misc]
    assert (code, verdict["status"]) == (2, "no case")
    assert "aten.atan.default" in capsys.readouterr().out
    assert "--real" in verdict["reason"]
    assert verdict["rejected"] == 40


@pytest.mark.nightly
def test_a_law_without_a_bound_for_an_operator_offers_no_tier_that_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, data = _run(tmp_path, "--real", "--adapter", "reference", "--law", "rounding.clipped-sum", build="summed_up")
    (verdict,) = data["verdicts"]  # type: ignore[misc]
    assert (code, verdict["status"]) == (2, "no case")
    assert "aten.cumsum.default has no rule" in capsys.readouterr().out
    assert "leave this law out" in verdict["reason"]
    assert "try --real" not in verdict["reason"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "m:build"], "--model needs --batch"),
        (["--batch", "m:batch"], "--batch is about a model of your own"),
        (["--real"], "--real is about a model of your own"),
        (["--units", "a,b"], "--units is about a model of your own"),
    ],
)
def test_half_a_model_is_a_usage_error(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_laws_of_the_other_tier_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = _run(tmp_path, "--adapter", "fully_shard", "--law", "rounding.update")
    assert code == 2
    assert "which run with --real" in capsys.readouterr().out


def test_a_token_is_trusted_with_what_the_reader_repeated_in_its_place() -> None:
    own = UserModelSpec("elsewhere:build", "elsewhere:batch")
    token = tokens.Token("training.plain", "fully_shard", TrainingCase(ModelSpec((), own=own)))
    found = tokens.trusted(token, own=("here:build", "here:batch", "", "")).case.model.own
    assert found is not None
    assert (found.build, found.batch) == ("here:build", "here:batch")
    with pytest.raises(InvalidToken, match="leave out --loss"):
        tokens.trusted(token, own=("here:build", "here:batch", "here:loss", ""))
    ordinary = replace(token, case=TrainingCase(ModelSpec((LayerSpec(1),))))
    with pytest.raises(InvalidToken, match="no model of your own"):
        tokens.trusted(ordinary, own=("here:build", "", "", ""))


def test_a_token_alone_imports_nothing() -> None:
    own = UserModelSpec("nowhere_at_all:build", "nowhere_at_all:batch")
    text = tokens.encode(tokens.Token("training.plain", "fully_shard", TrainingCase(ModelSpec((), own=own))))
    assert tokens.decode(text).case.model.own == own
    assert "nowhere_at_all" not in sys.modules


PRIVATE = ("norms.one-sided", "norms.scaling", "rounding.clip-factors", "rounding.clipped-sum")


def _statuses(data: dict[str, object]) -> dict[str, str]:
    return {verdict["law"]: verdict["status"] for verdict in data["verdicts"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fault", "adapter", "found"),
    [
        pytest.param(
            "nothing_is_clipped",
            "reference",
            {"rounding.clip-factors", "rounding.clipped-sum"},
            marks=pytest.mark.nightly,
        ),
        ("bias_left_out_of_norm", "reference", {"norms.one-sided", "rounding.clipped-sum"}),
        pytest.param(
            "bias_left_out_of_norm",
            "reference:bookkeeping",
            {"norms.one-sided", "rounding.clipped-sum"},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "factors_reported_and_not_used",
            "reference:bookkeeping",
            {"rounding.clipped-sum"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_is_wrong_with_clipping_is_found_on_a_users_weights(
    engine: SimulatedEngine, fault: str, adapter: str, found: set[str]
) -> None:
    own = inspection.inspect(f"{TOYS}:right", f"{TOYS}:batch").own
    run = Run(engine, adapter, (f"fsdpcheck.impl.faults:{fault}",), own=own)
    verdicts = [check_law(chapters()[name], run, world_sizes=(2,), shrink=False, most=8) for name in PRIVATE]
    assert {verdict.law for verdict in verdicts if verdict.status == "finding"} == found
    assert {verdict.law for verdict in verdicts if verdict.status == "holds"} == set(PRIVATE) - found


@pytest.mark.nightly
def test_a_step_that_does_not_clip_is_found_by_the_command(tmp_path: Path) -> None:
    law = ["--law", "rounding.clip-factors"]
    code, data = _run(tmp_path, "--adapter", "reference", "--real", "--install", "nothing_is_clipped", *law)
    (verdict,) = data["verdicts"]  # type: ignore[misc]
    assert (code, verdict["finding"]["what"]) == (1, "clip factors are not the declared rule of the reported norms")


@pytest.mark.parametrize(
    "adapter",
    [
        pytest.param("reference", marks=pytest.mark.nightly),
        pytest.param("reference_fsdp2", marks=pytest.mark.nightly),
        pytest.param("reference:bookkeeping", marks=pytest.mark.nightly),
    ],
)
def test_right_clipping_holds_on_a_users_weights_and_true_functions(adapter: str, tmp_path: Path) -> None:
    laws = [word for name in PRIVATE for word in ("--law", name)]
    code, data = _run(tmp_path, "--adapter", adapter, "--real", *laws, build="with_surrogate")
    assert (code, set(_statuses(data).values())) == (0, {"holds"})


@pytest.mark.nightly
def test_norms_of_layers_of_a_users_own_are_not_judged_and_that_is_said(tmp_path: Path) -> None:
    laws = [word for name in PRIVATE for word in ("--law", name)]
    code, data = _run(tmp_path, "--adapter", "reference", "--real", *laws, build="own_layer_used")
    assert code == 0
    unasked = {v["law"]: v["reason"] for v in data["verdicts"] if v["status"] == "not promised"}  # type: ignore[attr-defined]
    assert set(unasked) == {"norms.one-sided", "rounding.clipped-sum"}
    assert all("layers of your own" in reason for reason in unasked.values())
