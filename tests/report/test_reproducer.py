"""Programs of torch alone that show a finding: on gloo they print what simulated ranks have found, or nothing."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, OptimizerSpec, StepSpec, TrainingCase
from fsdpcheck.findings.tokens import Token, encode
from fsdpcheck.report import reproducer
from tests.common import commands
from tests.common.gloo_ranks import Ran, launched

ROOT = Path(__file__).parents[2]
TOY = "tests/toys/summing.py:parallelize"
SMALL = TrainingCase(ModelSpec((LayerSpec(1, True),)), MeshSpec(2), BatchLayout("contiguous", 2))
RIGHT: dict[str, TrainingCase] = {
    "micro-batches": replace(SMALL, layout=BatchLayout("ragged", 3, counts=(1, 2)), step=StepSpec(micro_batches=2)),
    "tied": TrainingCase(
        ModelSpec((LayerSpec(3, True),), "tokens", 2, 2, 3, padding_idx=0, tied=(-1, 0), units=(2,)),
        MeshSpec(2),
        BatchLayout("sampler", 3),
        StepSpec("l1", 2, normaliser=4, optimizer=OptimizerSpec("adamw", 1, weight_decay=0.5)),
    ),
    "frozen": TrainingCase(
        ModelSpec((LayerSpec(2, True, "relu", "bias"), LayerSpec(2, activation="hardtanh")), features=2, units=(1,)),
        MeshSpec(2, 2),
        BatchLayout("replicated", 2),
        StepSpec("hinge", 2, 2, False, optimizer=OptimizerSpec(momentum=0.5)),
    ),
    "padded by the kernel": TrainingCase(
        ModelSpec((LayerSpec(2, kind="conv", kernel=2, same=True), LayerSpec(2)), "signal", 2, 3, units=(1,)),
        MeshSpec(2),
        BatchLayout(batch_size=2),
    ),
    "means of bags": TrainingCase(
        ModelSpec((LayerSpec(2),), "bags", 2, 2, 3, padding_idx=0, units=(2,), bags="mean"),
        MeshSpec(2),
        BatchLayout(batch_size=2),
    ),
}
LONGEST = 60


def run(text: str, case: TrainingCase, folder: Path) -> Ran:
    program = folder / "repro.py"
    program.write_text(text, encoding="utf-8")
    return launched(program, case.world_size)


def written(adapter: str, case: TrainingCase, law: str = "training.plain", installs: tuple[str, ...] = ()) -> str:
    return reproducer.program(Token(law, adapter, case, installs), "What must hold.", Path("repro.py"))


def test_a_program_shows_on_gloo_what_is_wrong(tmp_path: Path) -> None:
    """What an average that became a sum makes of the smallest case, in a file that imports torch and no fsdpcheck."""
    text = written(TOY, SMALL)
    assert len(text.splitlines()) <= LONGEST
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not any("fsdpcheck" in ast.unparse(node) for node in imported)
    ran = run(text, SMALL, tmp_path)
    assert (ran.code, "got [[-11.]], wanted [[-5.]]" in ran.printed.replace(".0]", ".]")) == (1, True), ran.printed


def test_options_of_layers_are_written_as_python_takes_them() -> None:
    """A word stands in quotes, which it has not as torch prints the layer."""
    assert 'nn.Conv1d(2, 2, kernel_size=(2,), stride=(1,), padding="same", bias=False)' in written(
        "fully_shard", RIGHT["padded by the kernel"]
    )
    assert 'nn.EmbeddingBag(3, 2, mode="mean", padding_idx=0)' in written("fully_shard", RIGHT["means of bags"])


@pytest.mark.nightly
def test_what_a_replay_writes_shows_on_gloo_what_was_found(tmp_path: Path) -> None:
    file, token = tmp_path / "repro.py", encode(Token("training.plain", TOY, SMALL))
    code, out, err = commands.run(ROOT, "replay", token, "--adapter", TOY, "--script", str(file))
    assert code == 1, err
    assert f"script: torchrun --nproc-per-node 2 {file}" in out
    ran = run(file.read_text(encoding="utf-8"), SMALL, tmp_path)
    assert ran.code == 1, ran.printed
    got, wanted = (re.search(rf"^  {word} +(\S+)$", out, re.MULTILINE) for word in ("got", "wanted"))
    assert got is not None
    assert wanted is not None
    assert re.search(rf"got \[+{got[1]}\]+, wanted \[+{wanted[1]}\]+", ran.printed)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("adapter", ["fully_shard", "ddp"])
def test_programs_of_what_is_right_end_with_0(adapter: str, name: str, tmp_path: Path) -> None:
    case = replace(RIGHT[name], mesh=MeshSpec(2)) if adapter == "ddp" else RIGHT[name]
    ran = run(written(adapter, case), case, tmp_path)
    assert ran.code == 0, ran.printed


@pytest.mark.nightly
def test_a_known_finding_of_fully_shard_is_shown(tmp_path: Path) -> None:
    model = ModelSpec((LayerSpec(2), LayerSpec(2)), features=2)
    case = replace(SMALL, model=model, step=StepSpec(evaluates="inference_mode"))
    ran = run(written("fully_shard:inferring", case, "training.evaluation"), case, tmp_path)
    assert ran.code == 1
    assert re.search("nference tensors? (cannot be saved for backward|outside InferenceMode)", ran.printed), ran.printed


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (replace(SMALL, model=ModelSpec((LayerSpec(1, activation="gelu"),))), "the trait surrogates"),
        (replace(SMALL, model=ModelSpec((LayerSpec(1, activation="abs"),))), "a module Abs"),
        (replace(SMALL, step=StepSpec(clipping="unclipped")), "per-sample clipping"),
        (replace(SMALL, step=StepSpec(rebuilds=True)), "a model trained before"),
    ],
)
def test_what_no_program_of_torch_shows_is_said(case: TrainingCase, said: str) -> None:
    with pytest.raises(reproducer.NotWritten, match=said):
        written("fully_shard", case)


def test_a_planted_fault_and_an_adapter_without_snippets_are_refused() -> None:
    with pytest.raises(reproducer.NotWritten, match="a planted fault"):
        written("fully_shard", SMALL, installs=("fsdpcheck.impl.faults:averaged_twice",))
    with pytest.raises(reproducer.NotWritten, match=r"snippets: Snippets\(parallelize"):
        written("reference", SMALL)
    with pytest.raises(reproducer.NotWritten, match=r"the law lifecycle\.memory"):
        written("fully_shard", SMALL, "lifecycle.memory")
