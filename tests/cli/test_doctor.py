"""``fsdpcheck doctor``: what works here, and what to fix first, with the exit codes of every command."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from fsdpcheck.session import machine
from tests.common.commands import TOY, TOYS, run

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_all_that_works_is_named_with_what_a_promise_was_tried_on(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "doctor", "--json", "found.json")
    assert code == 0, out + err
    for said in (
        "processes +ok a step of ddp",
        "simulated +ok a step",
        "adapter ddp, imported in ",
        "training.plain +ok",
    ):
        assert re.search(said, out), said
    assert "which is no verdict\nnext: fsdpcheck run --adapter ddp" in out
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    laws = [event["name"] for event in found if event["event"] == "law"]
    assert {"training.plain", "collectives.plain", "samplers.dealt"} < {*laws}
    assert not any(event.get("problem") for event in found)


def test_the_adapters_of_a_gate_are_examined_where_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.fsdpcheck]\nadapter = ['zero_redundancy']\n")
    code, out, err = run(tmp_path, "doctor")
    assert code == 0, out + err
    assert "adapter zero_redundancy, imported in " in out
    assert out.endswith("which is no verdict\nnext: fsdpcheck gate\n")
    (tmp_path / "pyproject.toml").write_text("[tool.fsdpcheck]\nadapter = 7\n")
    code, _, err = run(tmp_path, "doctor")
    assert (code, "adapter names no adapters" in err, "pyproject.toml:2" in err) == (2, True, True)


def test_what_is_wrong_is_told_and_what_to_fix_first(tmp_path: Path) -> None:
    """An adapter that there is not, one that ends as it is imported, and one that prints and is wrong on two ranks."""
    (tmp_path / "loud.py").write_text(f"{(TOYS / 'unsharded.py').read_text()}\nprint('LOUD')\n")
    (tmp_path / "ends.py").write_text("import os\nos._exit(0)\n")
    named = ("refrence", "ends.py:adapter", "loud.py:adapter")
    code, out, err = run(tmp_path, "doctor", *(word for ref in named for word in ("--adapter", ref)))
    assert code == 2
    assert "fix first: refrence: unknown adapter 'refrence'. Did you mean 'reference'?" in out
    assert "adapter 'ends.py:adapter' ended the process that imported it" in out
    assert re.search(r"training\.plain +WRONG 2 ranks, .*\n +.*: got .*replay with: fsdpcheck replay 'v2:", out)
    assert "LOUD" not in out
    assert "LOUD" in err


def test_a_file_that_cannot_be_written_is_said_first(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "doctor", "--json", "no/such/folder.json", "--adapter", TOY)
    assert (code, "--json names a place in a folder that is not there" in err) == (2, True)


@pytest.mark.parametrize(
    ("found", "wanted", "mend"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", ""),
        ("2.14.0", ">=2.11,<2.14", "pip install 'torch>=2.11,<2.14'"),
        ("2.9.1", "<2.14,>=2.11", "pip install 'torch<2.14,>=2.11'"),
        ("2.11", ">=2.11", ""),
        ("1", "", ""),
    ],
)
def test_a_release_outside_of_what_is_asked_for_is_to_be_mended(found: str, wanted: str, mend: str) -> None:
    assert machine._outside("torch", found, wanted) == mend


def test_packages_that_are_missing_or_of_another_release_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in ("numpy", "opacus"):
            raise metadata.PackageNotFoundError(name)
        return "9.9"

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(machine, "_asked", lambda: {"torch": ">=2.11,<2.14"})
    facts = {fact.name: fact for fact in machine.packages()}
    assert facts["numpy"].mend == "pip install numpy"
    assert (facts["opacus"].found, facts["opacus"].mend) == ("not installed", "")
    assert facts["torch"].mend == "pip install 'torch>=2.11,<2.14'"
    assert facts["rich"].mend == ""


@pytest.mark.skipif(not CONSTRAINTS.is_file(), reason="only a checkout has the constraints")
def test_the_releases_that_were_tried_are_those_of_the_constraints() -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE))
    assert pinned
    assert pinned.items() <= machine.TRIED.items()
