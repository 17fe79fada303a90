"""What the documents say of laws, findings and files is what is registered, printed and there."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from fsdpcheck.adapters import load
from fsdpcheck.impl import faults
from fsdpcheck.judging.law import Law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.processes import zygote
from tests.common import commands

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
INSTALLED = Path(torch.__file__).parents[1]
LAWS = DOCS / "laws.md"
EXAMPLE = "docs/examples/skips_empty.py"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="only a checkout has the documents")


def test_every_link_leads_to_a_file_and_the_index_lists_every_document() -> None:
    linked: dict[str, set[Path]] = {}
    for page in (README, *DOCS.glob("*.md")):
        targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
        linked[str(page.relative_to(ROOT))] = {(page.parent / target).resolve() for target in targets}
    lost = {page: sorted(str(to) for to in found if not to.exists()) for page, found in linked.items()}
    assert {page: found for page, found in lost.items() if found} == {}
    pages = {*DOCS.glob("*.md"), *(DOCS / "examples").glob("*.py")} - {DOCS / "README.md"}
    assert pages - linked["docs/README.md"] == set(), "next: a row in docs/README.md"


def test_files_that_are_named_with_their_folder_are_there() -> None:
    pages = [README, *DOCS.glob("*.md")]
    sources = [
        page for room in ("fsdpcheck", "impl", "properties", "benchmarks") for page in (ROOT / room).rglob("*.py")
    ]
    there = {str(page.relative_to(ROOT)) for page in ROOT.rglob("*.py")}
    lost = []
    for page in (*pages, *sources):
        text = page.read_text(encoding="utf-8")
        if page.name == "findings-before-and-after.md":  # what an earlier commit printed names its own files
            text = re.sub(r"^```text\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for named in re.findall(r"(?<![\w./])(?:[a-z_\d]+/)+[a-z_\d]+\.py", text):
            of_torch = (INSTALLED / named).is_file()
            ours = any(f"/{path}".endswith(f"/{named}") for path in there)
            lost += [] if ours or of_torch else [f"{page.name}: {named}"]
    assert lost == []


REFERENCE = """
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
module = nn.Sequential()
module.blocks = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
per_sample_loss = lambda outputs, targets: ((outputs - targets) ** 2).sum(1)
expected_batch_size = 2
inputs, targets, indices = torch.ones(2, 2), torch.ones(2, 1), (0, 1)
"""


def test_the_reference_is_used_as_its_document_says(tmp_path: Path) -> None:
    example, checkpoint = re.findall(r"^```python\n(.*?)^```", (DOCS / "reference.md").read_text("utf-8"), re.M | re.S)
    program = (
        f"import os, sys\nos.dup2(int(sys.argv[1]), 1)\nos.dup2(1, 2)\nimport torch\n{REFERENCE}\n{example}\n"
        f"folder = {str(tmp_path / 'saved')!r}\n{checkpoint}\nprint('whole', flush=True)"
    )
    with (tmp_path / "out").open("w+") as out:
        code = zygote.start(program, [str(out.fileno())], [out.fileno()], f"{os.getpid()}.documents").wait()
        out.seek(0)
        assert (code, out.read()) == (0, "whole\n")


def test_the_readme_shows_a_finding_on_its_first_screen() -> None:
    """The command, and of what it prints all up to the cause; a terminal has 30 lines."""
    screen = README.read_text(encoding="utf-8").splitlines()[:30]
    order = [f"$ fsdpcheck run --adapter {EXAMPLE}:adapter", "FINDING 1: ", "  got  ", "  wanted  ", "  cause  "]
    places = [next(place for place, line in enumerate(screen) if line.startswith(begin)) for begin in order]
    assert places == sorted(places)


def test_the_finding_of_the_readme_is_what_is_printed() -> None:
    text = README.read_text(encoding="utf-8")
    ((step,), (shown, _)) = (re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S) for kind in ("python", "text"))
    assert step in (ROOT / EXAMPLE).read_text(encoding="utf-8")
    code, out, err = commands.run(ROOT, "run", "--adapter", f"{EXAMPLE}:adapter", "--law", "training.plain")
    assert code == 1, err
    printed = out[out.index("FINDING 1") :].partition("\n\n")[0].replace(f"{ROOT}/", "")
    assert shown.splitlines() == printed.splitlines(), "next: put what is printed into the README"


@pytest.mark.nightly
def test_the_comparison_of_the_readme_is_what_is_printed(tmp_path: Path) -> None:
    _, shown = re.findall(r"^```text\n(.*?)^```", README.read_text(encoding="utf-8"), re.M | re.S)
    shutil.copy(DOCS / "examples" / "padded_rows.py", tmp_path)
    code, out, err = commands.run(tmp_path, "compare", "padded_rows.py --batch-size {12//W}", "--ranks", "1,2")
    assert code == 1, err
    noise = re.compile(r"explains \S+")  # which depends on the processor
    lines = [noise.sub("", line) for line in out.splitlines()]
    wanted = [noise.sub("", line) for line in shown.splitlines()]
    assert lines[: len(wanted)] == wanted, "next: put it into the README"


def test_the_picture_of_a_step_is_what_is_printed(tmp_path: Path) -> None:
    text = (DOCS / "traces.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```console\n(.*?simulate.*?)^```", text, re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    shutil.copy(DOCS / "examples" / "sharded_step.py", tmp_path / "docs" / "examples")
    simulate, show = (line.split()[2:] for line in block.splitlines())
    assert commands.run(tmp_path, *simulate)[0] == 0
    assert commands.run(tmp_path, *show) == (0, shown, ""), "next: put what is printed into docs/traces.md"


@pytest.mark.nightly
def test_the_cost_of_a_large_model_is_what_is_printed() -> None:
    text = (DOCS / "cost.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^\$ fsdpcheck (.*)$", text, re.M)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    assert commands.run(DOCS.parent, *line.split()) == (0, shown, ""), "next: put what is printed into docs/cost.md"


def _blocks(section: str, language: str) -> list[str]:
    """The blocks of one section of docs/simulate.md."""
    text = (DOCS / "simulate.md").read_text(encoding="utf-8")
    part = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", part, re.M | re.S)


def test_programs_are_simulated_searched_and_shrunk_as_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks, said = ([*_blocks("In Python", kind), *_blocks("Shrinking", kind)] for kind in ("python", "text"))
    names: dict[str, object] = {"__name__": "steps"}
    for at, (block, wanted) in enumerate(zip(blocks, said, strict=True)):
        lines = "".join(blocks[:at]).count("\n") * "\n"
        exec(compile(lines + block, "steps.py", "exec"), names)
        assert capsys.readouterr().out == wanted, "next: put what is printed into docs/simulate.md"


def test_the_tests_of_the_document_pass(tmp_path: Path) -> None:
    (block,) = _blocks("In pytest", "python")
    (tmp_path / "test_steps.py").write_text(block)
    options = ["-p", "fsdpcheck.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path)]
    code, out, err = commands.run_pytest(tmp_path, options)
    assert (code, "= 5 passed" in out.splitlines()[-1]) == (0, True), out + err


def test_the_documents_name_every_chapter_and_count_the_laws() -> None:
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    table = text.split("## What must hold")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)}
    laws = _own_laws()
    assert named == {name.partition(".")[0] for name in laws}
    assert f"{len(laws)} laws in {len(named)} chapters" in table


def test_documents_count_the_findings_that_are_listed() -> None:
    listed = (DOCS / "findings.md").read_text(encoding="utf-8").split("\n## ")[0]
    owners = re.findall(r"^\| (\w+) \| .* \| \[report\]", listed, re.MULTILINE)
    words = {1: "one", 12: "twelve", 22: "twenty-two"}  # next: the word, where a finding is added
    opacus, deepspeed = owners.count("Opacus"), owners.count("DeepSpeed")
    pytorch = len(owners) - opacus - deepspeed
    said = f"{words[opacus]} defects of opacus, {words[pytorch]} of pytorch and {words[deepspeed]} of deepspeed"
    for page in (README, DOCS / "results.md"):
        assert said in page.read_text(encoding="utf-8").lower(), page.name


def test_the_document_of_laws_counts_the_faults_that_were_put_to_them() -> None:
    (said,) = re.findall(r"^Killed: of (\d+) planted faults", LAWS.read_text(encoding="utf-8"), re.MULTILINE)
    assert int(said) == len(faults.ALL), "next: put the new faults to all laws (fsdpcheck faults --every)"


def test_the_document_of_laws_has_numbers_or_says_that_there_are_none() -> None:
    """Cells are counts, "-" where the adapter does not promise the law, or "new" until it is measured."""
    rows = [line.strip("| ").split(" | ") for line in LAWS.read_text(encoding="utf-8").splitlines() if _is_row(line)]
    assert len(rows) == len(_own_laws())
    wrong = [(row[0], cell) for row in rows for cell in row[1:-1] if not re.fullmatch(r"-|[\d,]+|new", cell)]
    assert wrong == []


def _is_row(line: str) -> bool:
    return re.match(r"\| [a-z-]+\.[a-z0-9-]+ \|", line) is not None


@pytest.mark.parametrize("adapter", ["reference", "reference_fsdp2", "fully_shard", "fsdp1", "opacus:sound"])
def test_the_document_of_laws_says_who_promises_each(adapter: str) -> None:
    if adapter.startswith("opacus"):
        pytest.importorskip("opacus")
    lines = [line for line in LAWS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    (header, *rows) = [line.strip("| ").split(" | ") for line in lines]
    said = {row[0]: row[header.index(adapter)] != "-" for row in rows if len(row) == len(header)}
    features = load(adapter).features
    assert said == {name: not law.not_promised(features) for name, law in _own_laws().items()}


def _own_laws() -> dict[str, Law]:
    """fsdpcheck's: a test before this one may have loaded others."""
    return {name: law for name, law in chapters().items() if not law.file}
