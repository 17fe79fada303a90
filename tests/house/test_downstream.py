"""Repositories in docs/examples as a stranger runs them: green as they are, red with the right cause when broken.

A stranger has a fresh environment with the wheel of fsdpcheck, and a copy of the repository elsewhere.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.common.wheels import Fresh

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="only a checkout has the documents"),
]


TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
QUICKLY: Final = ("--jobs", "2", "--roots", "1", "--no-confirm")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    """An environment that has the wheel, and torch."""
    for needed in ("setuptools", "pip"):
        pytest.importorskip(needed)
    made = Fresh(tmp_path_factory.mktemp("fresh"))
    code, out, err = made.run(EXAMPLES.parent, "python", "-P", "-c", "import fsdpcheck; print(fsdpcheck.__file__)")
    assert (code, Path(out.strip()).is_relative_to(made.folder)) == (0, True), out + err
    return made


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of the repository with sharding from scratch."""
    return Path(shutil.copytree(EXAMPLES / "char_transformer", tmp_path / "char_transformer"))


def broken(folder: Path, file: str, bug: tuple[str, str]) -> Path:
    """The repository, after one edit."""
    source = (folder / file).read_text(encoding="utf-8")
    assert source.count(bug[0]) == 1
    (folder / file).write_text(source.replace(*bug), encoding="utf-8")
    return folder


def lines(out: str, kind: str) -> list[str]:
    """What findings say of one kind: their "cause" or "broken", say."""
    return [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith(f"  {kind} ")]


def test_a_gate_on_sharding_from_scratch_is_green(sharded: Path, fresh: Fresh) -> None:
    code, out, err = fresh.run(sharded, "fsdpcheck", "gate", "--jobs", "2")
    assert code == 0, out + err
    checks = json.loads((sharded / "fsdpcheck-baseline.json").read_text(encoding="utf-8"))["checks"]
    assert f"{len(checks)} checks hold, 0 findings" in out


NOT_AVERAGED: Final = ("        mean /= self.ranks\n", "")


@pytest.mark.parametrize(
    ("bug", "law", "cause"),
    [
        (NOT_AVERAGED, "training.plain", "added up over the ranks and not averaged"),
        (
            ("        dist.all_reduce(squares)\n", ""),
            "global-norm.returned",
            "each rank's norm is that of its own shard alone",
        ),
        (("-len(flat) % self.ranks", "0"), "collectives.plain", "parts of other sizes, which are to be padded"),
        (('    optimizer.load_state_dict(state["optimizer"])\n', ""), "state.resumed", "the optimizer's state did not"),
    ],
)
def test_a_gate_on_a_broken_copy_is_red_and_names_the_mistake(
    sharded: Path, fresh: Fresh, bug: tuple[str, str], law: str, cause: str
) -> None:
    gate = ("gate", *QUICKLY, "--law", f"{law.partition('.')[0]}.*")
    code, out, err = fresh.run(broken(sharded, "sharded.py", bug), "fsdpcheck", *gate)
    assert (code, f"breaks {law}" in out) == (1, True), out + err
    assert cause in lines(out, "cause")[0], out


def test_real_ranks_under_torchrun_are_green_and_red_and_a_replay_says_why(sharded: Path, fresh: Fresh) -> None:
    laws = ("--law", "training.plain,state.resumed")
    gate = [*TORCHRUN, "2", "-m", "fsdpcheck", "gate", "--baseline", "two.json", *laws]
    for more in (["--update"], []):
        code, out, err = fresh.run(sharded, "python", *gate, *more)
        assert (code, "2 checks hold, 0 findings" in out, "ranks: 2 of torchrun" in out) == (0, True, True), out + err
    code, out, err = fresh.run(broken(sharded, "sharded.py", NOT_AVERAGED), "python", *gate)
    one_of = "added up over the ranks and not averaged", " or the first sample of each micro-batch is counted twice"
    assert (code, [words in lines(out, "cause")[0] for words in one_of]) == (1, [True, True]), out + err
    (replay,) = re.findall(r"replay with: fsdpcheck (.*)", out)
    code, out, err = fresh.run(sharded, "fsdpcheck", *shlex.split(replay), "--engine", "simulated")
    assert (code, [words in lines(out, "cause")[0] for words in one_of]) == (1, [True, False]), out + err


def test_its_script_agrees_with_itself_on_one_rank_and_runs_on_real_ones(sharded: Path, fresh: Fresh) -> None:
    code, out, err = fresh.run(sharded, "fsdpcheck", "compare", "train.py --steps 2", "--ranks", "1,2,3")
    assert code == 0, out + err
    losses = set()
    for ranks in ("1", "3"):
        words = [*TORCHRUN, ranks, "train.py", "--steps", "2", "--batch-size", "6"]
        code, out, err = fresh.run(sharded, "python", *words)
        assert code == 0, err
        losses.add(out)
    assert len(losses) == 1
    assert "step 1: loss" in losses.pop()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A copy of the repository that trains privately with Opacus."""
    pytest.importorskip("opacus")
    return Path(shutil.copytree(EXAMPLES / "private_finetuning", tmp_path / "private_finetuning"))


def test_a_gate_on_private_fine_tuning_is_green_through_its_waivers_alone(private: Path, fresh: Fresh) -> None:
    gate: Sequence[str] = ("gate", "--jobs", "2", "--no-confirm")
    code, out, err = fresh.run(private, "fsdpcheck", *gate, "--json", "out.json")
    assert code == 0, out + err
    assert out.count("WAIVED: 4 findings: clipping.* on ") == 1, out
    assert out.count("its witness breaks still, and met by no case of this session: clipping.beside on ") == 1, out
    verdicts = json.loads((private / "out.json").read_text(encoding="utf-8"))["verdicts"]
    found = {one["law"] for one in verdicts if one["status"] == "finding"}
    assert found == {f"clipping.{law}" for law in ("coefficients", "factors", "norms", "sum")}
    assert "the row of padding_idx, which has no gradient, counts in the norm" in out
    settings = (private / "pyproject.toml").read_text(encoding="utf-8")
    (private / "pyproject.toml").write_text(settings[: settings.index("[[tool.fsdpcheck.waiver]]")], encoding="utf-8")
    assert fresh.run(private, "fsdpcheck", *gate, "--roots", "1", "--law", "clipping.factors")[0] == 1


SKIPPED: Final = ("self.optimizer.signal_skip_step(do_skip=number < last)", "pass")


@pytest.mark.parametrize(
    ("bug", "law", "kind", "words"),
    [
        (
            ("max_grad_norm=clip_norm", "max_grad_norm=2 * clip_norm"),
            "clipping.factors",
            "cause",
            "clipped to 2 times the clip norm",
        ),
        (SKIPPED, "training.private-unclipped", "when", "holds with one change: one micro-batch"),
    ],
)
def test_a_gate_on_a_broken_private_step_is_red_and_names_the_mistake(
    private: Path, fresh: Fresh, bug: tuple[str, str], law: str, kind: str, words: str
) -> None:
    """By a finding that no waiver covers, though they are of the same laws. What is left out has lines, no cause."""
    gate = ("gate", "--jobs", "2", "--no-confirm", "--law", law)
    code, out, err = fresh.run(broken(private, "private.py", bug), "fsdpcheck", *gate)
    assert (code, f"breaks {law}\n" in out) == (1, True), out + err
    assert words in lines(out, kind)[0], out
    assert kind == "cause" or "private.py:43 in PrivateTraining.step: pass" in out, out


def test_under_torchrun_it_is_green_through_its_waivers_too(private: Path, fresh: Fresh) -> None:
    laws = ("--law", "clipping.norms,clipping.beside,training.private-unclipped")
    gate = [*TORCHRUN, "3", "-m", "fsdpcheck", "gate", "--baseline", "three.json", *laws, "--update"]
    code, out, err = fresh.run(private, "python", *gate)
    assert (code, out.count("WAIVED: 1 finding: clipping.* on ")) == (0, 1), out + err
    assert "clipping.beside on fsdpcheck_adapter.py:adapter, until 2030-12-31: opacus_weight_beside_its_layer" in out
    assert "three.json: 3 checks; commit it" in out


def test_it_trains_on_real_ranks(private: Path, fresh: Fresh) -> None:
    code, out, err = fresh.run(private, "python", *TORCHRUN, "2", "train.py", "--steps", "2")
    assert code == 0, err
    assert "step 1: loss " in out
    assert ", epsilon " in out
