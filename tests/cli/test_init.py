"""`fsdpcheck init`: what it writes runs, and nothing that is there is written over."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.common.commands import run

NIGHTLY = ("ddp", "fsdp1", "private", "step")
LAWS = {
    "private": "training.private-clipped,noise.scale",
    "fsdp2": "training.plain,global-norm.update,shards.cover",
}


@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY)])
def test_what_is_written_holds_and_is_gated(kind: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "mine"')
    code, out, err = run(tmp_path, "init", kind)
    assert code == 0, err
    assert out.splitlines()[-1].startswith("next: fsdpcheck gate --update")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".github", "fsdpcheck_adapter.py", "pyproject.toml"]
    workflow = (tmp_path / ".github" / "workflows" / "fsdpcheck.yml").read_text()
    assert f"pip install torch=={metadata.version('torch').partition('+')[0]} --index-url" in workflow
    quick = ("--law", LAWS.get(kind, "training.plain,global-norm.update"), "--jobs", "1")
    code, out, err = run(tmp_path, "gate", "--update", *quick)
    assert code == 0, out + err
    assert run(tmp_path, "gate", *quick)[0] == 0


BUGS = (
    ("step", "            parameter.grad /= self.setup.world_size\n", "", "training.plain"),
    ("private", ", max=1.0)", ")", "training.private-clipped"),
    ("private", "manual_seed(setup.seed)", "manual_seed(setup.seed + setup.rank)", "noise.scale"),
    ("fsdp2", ', "dp_shard")', ")", "shards.cover"),
    ("fsdp1", "return self.model.clip_grad_norm_(", "return super().clip(", "global-norm.update"),
)


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "law"), [BUGS[0], *(pytest.param(*bug, marks=pytest.mark.nightly) for bug in BUGS[1:])]
)
def test_a_bug_in_what_is_written_is_found(kind: str, right: str, wrong: str, law: str, tmp_path: Path) -> None:
    assert run(tmp_path, "init", kind, "--no-workflow")[0] == 0
    adapter = tmp_path / "fsdpcheck_adapter.py"
    text = adapter.read_text()
    adapter.write_text(text.replace(right, wrong))
    assert adapter.read_text() != text
    code, out, _ = run(tmp_path, "gate", "--update", "--law", law, "--jobs", "1")
    assert (code, f"FINDING 1: fsdpcheck_adapter.py:adapter breaks {law}" in out) == (1, True)


@pytest.mark.parametrize("there", ["fsdpcheck_adapter.py", ".github/workflows/fsdpcheck.yml", "pyproject.toml"])
def test_nothing_is_written_over(there: str, tmp_path: Path) -> None:
    path = tmp_path / there
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[tool.fsdpcheck]\n")
    code, _, err = run(tmp_path, "init", "ddp")
    assert (code, path.read_text()) == (2, "[tool.fsdpcheck]\n")
    assert "something is there already, and nothing was written" in err
    assert there in err
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [path]


def test_flat_parameters_of_ones_own_are_said_to_be_the_optimizers(tmp_path: Path) -> None:
    assert run(tmp_path, "init", "fsdp1", "--no-workflow")[0] == 0
    assert "optimizer=setup.optimizer(shards)" in (tmp_path / "fsdpcheck_adapter.py").read_text()


def test_a_broken_project_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project\n")
    code, _, err = run(tmp_path, "init", "ddp")
    assert (code, "pyproject.toml is no TOML" in err) == (2, True)
