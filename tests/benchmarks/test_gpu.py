"""``tox -e gpu``: rows end as ran, skipped with a reason or failed with one, and nothing is said without a GPU."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not (Path(__file__).parents[2] / "benchmarks").is_dir():
    pytest.skip("only a checkout has the benchmarks", allow_module_level=True)
gpu, gpu_ranks = (pytest.importorskip(f"benchmarks.{name}") for name in ("gpu", "gpu_ranks"))


def _run(*arguments: str) -> tuple[list[str], int]:
    told, code = [], 0
    try:
        told += gpu.lines(*arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    return told, code


def _rows(file: Path) -> dict[str, str]:
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]["device"] == "cpu"
    return {row["name"]: row["outcome"] for row in data["rows"]}


def test_without_a_gpu_nothing_is_run_or_written_and_the_code_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told: list[str] = []
    with pytest.raises(SystemExit) as end:
        told += gpu.lines("cuda", str(tmp_path / "gpu.json"))
    assert end.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_row_runs_is_skipped_or_fails_alone_and_all_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(device: str) -> list[str]:
        raise RuntimeError("other bits")

    def lacks(device: str) -> list[str]:
        raise ModuleNotFoundError(name="scipy")

    monkeypatch.setitem(gpu.ROWS, "fails", fails)
    monkeypatch.setitem(gpu.ROWS, "lacks", lacks)
    for slow in ("equal bits", "laws", "hangs", "gloo", "kernels"):
        monkeypatch.delitem(gpu.ROWS, slow)
    file = tmp_path / "gpu.json"
    told, code = _run("cpu", str(file))
    wanted = {
        "poison": "ran", "switches": "ran", "streams": "skipped", "kernels K1 K2": "skipped",
        "kernels chosen": "ran", "claim E2": "skipped", "fails": "failed", "lacks": "skipped",
    }  # fmt: skip
    assert (_rows(file), code) == (wanted, 1)
    assert any("RuntimeError: other bits" in line for line in told)
    assert any("scipy is not installed" in line for line in told)
    monkeypatch.setattr(gpu, "revision", lambda short: "of later")
    assert _run("cpu", str(file), "poison")[1] == 0
    assert _rows(file) == {"poison": "ran", **wanted}, "rows that are not measured again stay"
    later = [row["name"] for row in json.loads(file.read_text())["rows"] if row["commit"] == "of later"]
    assert later == ["poison"]


def test_other_bits_of_the_device_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "_ADAPTERS", ("reference",))
    cases = gpu_ranks._cases
    monkeypatch.setattr(gpu_ranks, "_cases", lambda run, most: islice(cases(run, most), 3))
    simulated, real = gpu_ranks.equal_bits("cpu")
    assert simulated.startswith("simulated: reference: 3 cases on at most 4 ranks")
    assert real.startswith("processes: reference: 3 cases on at most 4 ranks")
    monkeypatch.setattr(gpu_ranks, "_difference", lambda one, other, gradients: "parameter w")
    with pytest.raises(RuntimeError, match="3 cases differ on simulated ranks"):
        gpu_ranks.equal_bits("cpu")


def test_kinds_of_ranks_that_a_machine_lacks_are_named_and_the_others_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks.metal.Metal, "lacks", lambda self, ranks: "1 GPU" if self.backend == "nccl" else "")
    told = gpu_ranks._on_each("cuda", lambda kind: iter([f"measured on {kind}"]))
    assert told == [
        "simulated-cuda: measured on simulated-cuda", "gloo-cuda: measured on gloo-cuda", "nccl: skipped, 1 GPU"
    ]  # fmt: skip
    monkeypatch.setattr(gpu_ranks.metal.Metal, "lacks", lambda self, ranks: "no GPU")
    with pytest.raises(gpu_ranks.Skipped, match="simulated-cuda: skipped, no GPU; gloo-cuda: skipped, no GPU; nccl"):
        gpu_ranks._on_each("cuda", lambda kind: iter([]))


@pytest.mark.parametrize(("gradients", "said"), [(0, "parameter w of rank 0 in step 0"), (1, "")])
def test_after_an_optimizer_that_rounds_gradients_of_the_first_step_are_compared(gradients: int, said: str) -> None:
    def execution(*steps: tuple[float, float]) -> Any:
        shown = [SimpleNamespace(grads={"w": torch.tensor(g)}, params={"w": torch.tensor(p)}) for g, p in steps]
        return SimpleNamespace(failure=None, ranks=[SimpleNamespace(rank=0, steps=shown)])

    one, other = execution((1.0, 2.0), (3.0, 4.0)), execution((1.0, 2.5), (3.5, 4.5))
    assert gpu_ranks._difference(one, other, gradients) == said
    assert gpu_ranks._difference(one, execution((1.5, 2.0), (3.0, 4.0)), gradients) == (
        "gradient w of rank 0 in step 0"
    )


@pytest.mark.nightly
def test_what_a_cpu_can_run_of_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    _, code = _run("cpu", str(file))
    assert code == 0
    assert {name for name, outcome in _rows(file).items() if outcome == "ran"} == {
        "poison",
        "switches",
        "equal bits",
        "laws",
        "hangs",
        "gloo",
        "kernels",
    }


def test_what_is_chosen_by_a_measurement_is_told_beside_the_rule() -> None:
    told = gpu.ROWS["kernels chosen"]("cpu")
    assert len(told) == 6
    assert told[0].startswith("T=1 d=32 p=32 bfloat16, by kernels: ")
    assert all(line.endswith("the rule says half_gram") for line in told[:2])
    assert told[5].endswith("the rule says direct")
    assert all(" bmm;" not in line for line in told[::2]), "it holds the gradients"
