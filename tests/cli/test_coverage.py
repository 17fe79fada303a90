"""`fsdpcheck run --coverage FILE`: which lines and branches of an implementation cases reached, and which law's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.common.commands import run

coverage = pytest.importorskip("coverage")

ADAPTER = """
import torch.distributed as dist
from fsdpcheck.adapter import Features

def averaged(values, ranks):
    if ranks > 1000:
        raise ValueError("no case has so many")
    if ranks == 1:
        return values
    dist.all_reduce(values)
    return values / ranks

class Trainer:
    def __init__(self, model, setup):
        self.model, self.setup = model, setup
        self.optimizer = setup.optimizer(model.parameters())

    def step(self, batch):
        self.optimizer.zero_grad()
        for micro in batch.micro_batches:
            losses = self.setup.loss(self.model(micro.inputs), micro.targets)
            (losses.sum() * batch.loss_scale).backward()
        for parameter in self.model.parameters():
            parameter.grad = averaged(parameter.grad, self.setup.world_size)
        self.optimizer.step()

    def parameters(self):
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

class DataParallel:
    name = "data_parallel"
    features = Features(promises=frozenset({"plain"}), accepts=frozenset({"bias", "ragged"}))

    def build(self, model, setup):
        return Trainer(model, setup)

adapter = DataParallel()
"""


def _line(of: str) -> int:
    return next(number for number, line in enumerate(ADAPTER.splitlines(), 1) if of in line)


def _asked(folder: Path, *more: str) -> tuple[int, str, str]:
    (folder / "mine.py").write_text(ADAPTER)
    plan = ("--adapter", "mine.py:adapter", "--law", "training.plain,collectives.plain", *more)
    return run(folder, "run", *plan, "--coverage", "reached")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_no_case_reached_is_named_and_nothing_else(tmp_path: Path, jobs: str) -> None:
    code, out, _ = _asked(tmp_path, "--jobs", jobs)
    assert code == 0, out
    (row, missed) = re.search(r"^(.*mine\.py)\n +(.*)$", out, re.MULTILINE).groups()  # type: ignore[union-attr]
    assert missed == str(_line("raise ValueError"))
    assert row.split() == ["16/17", "7/8", "mine.py"], "of functions; the bodies of modules and classes are not counted"
    assert re.search(r"^ *\d+ +\d+  training\.plain$", out, re.MULTILINE), "a row a law"
    data = coverage.CoverageData(str(tmp_path / "reached"))
    data.read()
    assert data.measured_contexts() >= {"training.plain", "collectives.plain"}
    (file,) = data.measured_files()
    assert Path(file).name == "mine.py"


def test_ranks_of_one_alone_reach_less(tmp_path: Path) -> None:
    _, out, _ = _asked(tmp_path, "--world-size", "1", "--law", "training.plain", "--jobs", "1")
    missed = re.search(r"mine\.py\n +(.*)$", out, re.MULTILINE)
    assert missed is not None
    first, last = _line("dist.all_reduce"), _line("return values / ranks")
    assert missed[1] == f"{_line('raise ValueError')}, {first}-{last}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "processes"), "--coverage measures simulated ranks"),
        (("--json", "report.json", "--resume"), "--coverage measures a whole session"),
    ],
)
def test_what_cannot_be_measured_has_code_2_before_anything_runs(
    tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    code, out, err = _asked(tmp_path, *options)
    assert (code, said in err) == (2, True), out + err
    assert not (tmp_path / "reached").exists()


def test_a_file_in_no_folder_has_code_2(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "run", "--law", "training.plain", "--coverage", "nowhere/reached")
    assert (code, "--coverage FILE cannot be written" in err) == (2, True), out + err
