"""Repositories in docs/examples as a stranger runs them: green as they are, red with the right cause when broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.common.commands import environment, run

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="only a checkout has the documents"),
]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of the repository with sharding from scratch."""
    return Path(shutil.copytree(EXAMPLES / "char_transformer", tmp_path / "char_transformer"))


def test_a_gate_on_sharding_from_scratch_is_green(sharded: Path) -> None:
    code, out, err = run(sharded, "gate", "--jobs", "2")
    assert code == 0, out + err
    checks = json.loads((sharded / "fsdpcheck-baseline.json").read_text(encoding="utf-8"))["checks"]
    assert f"{len(checks)} checks hold, 0 findings" in out


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (("        mean /= self.ranks\n", ""), "the parameters are not the single device's"),
        (("        dist.all_reduce(squares)\n", ""), "breaks global-norm."),
        (("-len(flat) % self.ranks", "0"), "breaks training.plain"),
        (('    optimizer.load_state_dict(state["optimizer"])\n', ""), "breaks state.resumed"),
    ],
)
def test_a_gate_on_a_broken_copy_is_red(sharded: Path, bug: tuple[str, str], said: str) -> None:
    source = (sharded / "sharded.py").read_text(encoding="utf-8")
    assert source.count(bug[0]) == 1
    (sharded / "sharded.py").write_text(source.replace(*bug), encoding="utf-8")
    code, out, _ = run(sharded, "gate", "--jobs", "2", "--roots", "1", "--no-confirm")
    assert (code, said in out) == (1, True), out


def test_its_script_agrees_with_itself_on_one_rank_and_runs_on_real_ones(sharded: Path) -> None:
    code, out, err = run(sharded, "compare", "train.py --steps 2", "--ranks", "1,2,3")
    assert code == 0, out + err
    losses = set()
    for ranks in ("1", "3"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        done = subprocess.run(
            [*launch, "train.py", "--steps", "2", "--batch-size", "6"],
            cwd=sharded, env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        losses.add(done.stdout)
    assert len(losses) == 1
    assert "step 1: loss" in losses.pop()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A copy of the repository that trains privately with Opacus."""
    pytest.importorskip("opacus")
    return Path(shutil.copytree(EXAMPLES / "private_finetuning", tmp_path / "private_finetuning"))


def test_a_gate_on_private_fine_tuning_is_green_through_its_waivers_alone(private: Path) -> None:
    code, out, err = run(private, "gate", "--jobs", "2", "--no-confirm", "--json", "out.json")
    assert code == 0, out + err
    assert out.count("WAIVED: 4 findings: clipping.* on ") == 1, out
    assert out.count("WAIVED: 1 finding: clipping.beside on ") == 1, out
    verdicts = json.loads((private / "out.json").read_text(encoding="utf-8"))["verdicts"]
    found = {one["law"] for one in verdicts if one["status"] == "finding"}
    assert found == {f"clipping.{law}" for law in ("coefficients", "factors", "norms", "sum", "beside")}
    assert "the row of padding_idx, which has no gradient, counts in the norm" in out
    settings = (private / "pyproject.toml").read_text(encoding="utf-8")
    (private / "pyproject.toml").write_text(settings[: settings.index("[[tool.fsdpcheck.waiver]]")], encoding="utf-8")
    assert run(private, "gate", "--jobs", "2", "--no-confirm", "--roots", "1", "--law", "clipping.factors")[0] == 1


@pytest.mark.parametrize(
    ("bug", "law"),
    [
        (("max_grad_norm=clip_norm", "max_grad_norm=2 * clip_norm"), "clipping.factors"),
        (("self.optimizer.signal_skip_step(do_skip=number < last)", "pass"), "training.private-unclipped"),
    ],
)
def test_a_gate_on_a_broken_private_step_is_red(private: Path, bug: tuple[str, str], law: str) -> None:
    """By a finding that the waivers do not cover, though they are of the same laws."""
    source = (private / "private.py").read_text(encoding="utf-8")
    assert source.count(bug[0]) == 1
    (private / "private.py").write_text(source.replace(*bug), encoding="utf-8")
    code, out, _ = run(private, "gate", "--jobs", "2", "--no-confirm", "--law", law)
    assert (code, f"breaks {law}" in out) == (1, True), out


def test_it_trains_on_real_ranks(private: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "train.py", "--steps", "2"],
        cwd=private, env={**environment(), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "step 1: loss " in done.stdout
    assert ", epsilon " in done.stdout
