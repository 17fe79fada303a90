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
gpu = pytest.importorskip("benchmarks.gpu")


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
    for slow in ("equal bits", "gloo", "kernels"):
        monkeypatch.delitem(gpu.ROWS, slow)
    file = tmp_path / "gpu.json"
    told, code = _run("cpu", str(file))
    wanted = {"poison": "ran", "kernels K1 K2": "skipped", "claim E2": "skipped", "fails": "failed", "lacks": "skipped"}
    assert (_rows(file), code) == (wanted, 1)
    assert any("RuntimeError: other bits" in line for line in told)
    assert any("scipy is not installed" in line for line in told)
    monkeypatch.setattr(gpu, "revision", lambda short: "of later")
    assert _run("cpu", str(file), "poison")[1] == 0
    assert _rows(file) == {"poison": "ran", **wanted}, "rows that are not measured again stay"
    later = [row["name"] for row in json.loads(file.read_text())["rows"] if row["commit"] == "of later"]
    assert later == ["poison"]


def test_other_bits_of_the_device_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_ADAPTERS", ("reference",))
    cases = gpu._cases
    monkeypatch.setattr(gpu, "_cases", lambda run: islice(cases(run), 3))
    (told,) = gpu._equal_bits("cpu")
    assert told.startswith("reference: 3 cases")
    monkeypatch.setattr(gpu, "_difference", lambda one, other, gradients: "parameter w")
    with pytest.raises(RuntimeError, match="3 cases differ on cpu"):
        gpu._equal_bits("cpu")


@pytest.mark.parametrize(("gradients", "said"), [(0, "parameter w of rank 0 in step 0"), (1, "")])
def test_after_an_optimizer_that_rounds_gradients_of_the_first_step_are_compared(gradients: int, said: str) -> None:
    def execution(*steps: tuple[float, float]) -> Any:
        shown = [SimpleNamespace(grads={"w": torch.tensor(g)}, params={"w": torch.tensor(p)}) for g, p in steps]
        return SimpleNamespace(failure=None, ranks=[SimpleNamespace(rank=0, steps=shown)])

    one, other = execution((1.0, 2.0), (3.0, 4.0)), execution((1.0, 2.5), (3.5, 4.5))
    assert gpu._difference(one, other, gradients) == said
    assert gpu._difference(one, execution((1.5, 2.0), (3.0, 4.0)), gradients) == ("gradient w of rank 0 in step 0")


@pytest.mark.nightly
def test_what_a_cpu_can_run_of_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    _, code = _run("cpu", str(file))
    assert code == 0
    assert {name for name, outcome in _rows(file).items() if outcome == "ran"} == {
        "poison",
        "equal bits",
        "gloo",
        "kernels",
    }
