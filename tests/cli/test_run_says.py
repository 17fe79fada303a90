"""What `fsdpcheck run` says of what it does not judge."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from fsdpcheck.cli import replay
from tests.common.commands import LAWS, TOY, run


@pytest.mark.parametrize(("worlds", "ragged"), [("1", True), ("2-3", False)])
def test_accepted_traits_that_no_case_demanded_are_said(tmp_path: Path, worlds: str, ragged: bool) -> None:
    arguments = ["--world-size", worlds, "--json", "out.json"]
    code, out, _ = run(tmp_path, "run", "--adapter", TOY, "--laws", LAWS, "--law", "toy.completes", *arguments)
    (verdict,) = json.loads((tmp_path / "out.json").read_text())["verdicts"]
    said = next((line for line in out.splitlines() if "accepted, but in no case of these laws" in line), "")
    assert (code, "ragged" in verdict["undrawn"], "ragged" in said) == (0, ragged, ragged)
    accepted = {"ragged", "empty-rank", "rows<ranks", "uneven-rows", "root-parameters"}
    assert set(verdict["undrawn"]) == accepted - set(verdict["census"])


def test_a_run_beside_settings_of_a_gate_says_that_it_does_not_read_them(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.fsdpcheck]\nadapter = ['mine.py:adapter']\n")
    said = "[tool.fsdpcheck] of pyproject.toml is read by `fsdpcheck gate`; this run judges fsdp1, fully_shard, "
    assert said in run(tmp_path, "run", "--law", "none.such")[2]
    assert said not in run(tmp_path, "run", "--law", "none.such", "--adapter", "ddp")[2]
    (tmp_path / "pyproject.toml").write_text("[tool.others]\n")
    assert said not in run(tmp_path, "run", "--law", "none.such")[2]


def test_numbers_of_ranks_that_were_requested_are_judged_and_those_in_no_case_are_said(tmp_path: Path) -> None:
    """Seven ranks are dear, and cases of them were left out in silence; a law of three and more says nothing on two."""
    (tmp_path / "test_three.py").write_text(
        "from fsdpcheck import strategies\n"
        "from fsdpcheck.laws import law\n"
        "@law('toy.three', promise='plain', space=strategies.PLAIN.but(ranks=3))\n"
        "def test_three(case, run):\n"
        '    """It runs. Source: no public report known."""\n'
        "    run(case)\n"
    )
    arguments = ["--world-size", "1,2,7", "--json", "out.json", "--laws", "test_three.py", "--laws", LAWS]
    code, out, err = run(tmp_path, "run", "--adapter", TOY, "--law", "toy.completes,toy.three", *arguments)
    assert code == 0, out + err
    judged = {one["law"]: one["census"] for one in json.loads((tmp_path / "out.json").read_text())["verdicts"]}
    assert {"W=1", "W=2", "W=7"} <= judged["toy.completes"].keys()
    assert "W=7" in judged["toy.three"]
    assert "2 ranks were requested, in no case of 1 of the 2 laws that hold: toy.three" in out
    assert "7 ranks were requested" not in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cuda"], "these ranks cannot be had here\n  got     ranks on a GPU need one; this is torch"),
        (["--device", "cuda", "--engine", "processes"], "  next    leave --device cuda out"),
        (["--engine", "processes", "--backend", "nccl"], "  next    say --device cuda"),
        (["--device", "cuda", "--backend", "gloo"], "  next    leave --backend out: simulated ranks meet in memory"),
    ],
    ids=["no GPU", "no GPU for processes", "NCCL without a GPU", "simulated over gloo"],
)
def test_ranks_that_cannot_be_had_are_told_and_nothing_is_judged(tmp_path: Path, words: list[str], said: str) -> None:
    code, out, err = run(tmp_path, "run", "--adapter", TOY, "--laws", LAWS, "--law", "toy.completes", *words)
    assert (code, "holds" in out) == (2, False)
    assert said in out + err


@pytest.mark.parametrize(
    ("known", "words", "kind"),
    [
        ("simulated", [], "simulated"),
        ("torchrun", [], "processes"),
        ("simulated", ["--device", "cuda"], "simulated-cuda"),
        ("processes", ["--device", "cuda"], "nccl"),
        ("simulated", ["--device", "cuda", "--backend", "gloo"], "gloo-cuda"),
        ("processes", ["--engine", "simulated"], "simulated"),
    ],
)
def test_a_replay_takes_from_the_token_what_is_not_said_of_ranks(known: str, words: list[str], kind: str) -> None:
    parser = argparse.ArgumentParser()
    replay.add(parser.add_subparsers())
    assert replay._kind(parser.parse_args(["replay", "v2:token", *words]), known) == kind
