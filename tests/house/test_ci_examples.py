"""The files for a CI in docs/examples/ci: each command of theirs is one that there is, and the action's gate works."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpcheck import cli
from tests.common.commands import LAWS, TOY, environment

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "ci"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="only a checkout has the documents")

VALUES = {"$ARGUMENTS": "", '"$found"': "found.json", "{posargs}": "", '"$GITHUB_STEP_SUMMARY"': "summary.md"}


def _blocks(file: str) -> list[str]:
    """What each ``run:`` of a workflow has a shell do; a folded block is one line."""
    found: list[str] = []
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if match := re.fullmatch(r"( *)(?:- )?run: (.*)", line):
            indent, rest = len(match[1]), match[2]
            if rest in ("|", ">-"):
                block = []
                for later in lines[number + 1 :]:
                    if later.strip() and len(later) - len(later.lstrip()) <= indent + 2 * line.lstrip().startswith(
                        "- "
                    ):
                        break
                    block.append(later.strip())
                rest = (" " if rest == ">-" else "\n").join(block)
            found.append(rest)
    return found


def _commands() -> Iterator[tuple[str, list[str]]]:
    """(file, words) of each command of fsdpcheck."""
    texts = [(file, block) for file in ("action.yml", "workflow.yml") for block in _blocks(file)]
    for file, pattern in (("tox.ini", r"^commands = (.*)"), ("pre-commit-config.yaml", r"entry: (.*)")):
        texts += [
            (file, line) for line in re.findall(pattern, (FOLDER / file).read_text(encoding="utf-8"), re.MULTILINE)
        ]
    for file, text in texts:
        joined = re.sub(r"\$\{\{.*?\}\}", "1", text.replace("\\\n", " "))
        for name, value in VALUES.items():
            joined = joined.replace(name, value)
        for line in joined.splitlines():
            if line.startswith("fsdpcheck "):
                yield file, shlex.split(line.partition("||")[0])[1:]


def test_each_command_is_one_that_there_is() -> None:
    found = list(_commands())
    assert [(file, words[0]) for file, words in found] == [
        ("action.yml", "gate"),
        *(("workflow.yml", name) for name in ("replay", "run", "run", "merge", "report")),
        *(("tox.ini", "gate"), ("pre-commit-config.yaml", "doctor")),
    ]
    for _, words in found:
        cli._parser().parse_args(words)
    nox = re.search(r'session\.run\("fsdpcheck", "(\w+)", \*session\.posargs\)', (FOLDER / "noxfile.py").read_text())
    assert nox is not None
    cli._parser().parse_args([nox[1]])


@pytest.mark.nightly
def test_the_gate_of_the_action_is_green_and_red(tmp_path: Path) -> None:
    """Its own lines, run by a shell in a repository with a baseline; then a law that broke."""
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.fsdpcheck]\nadapter = ["{TOY}"]\nlaws = ["{LAWS}"]\nlaw = ["toy.completes"]\nno-confirm = true\n'
    )
    command = tmp_path / "bin" / "fsdpcheck"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m fsdpcheck "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    (block,) = (block for block in _blocks("action.yml") if "fsdpcheck gate" in block)

    def gated(arguments: str) -> int:
        shell = {"ARGUMENTS": arguments, "GITHUB_STEP_SUMMARY": "summary.md", "PATH": path}
        done = subprocess.run(["bash", "-e", "-c", block], cwd=tmp_path, env={**environment(), **shell}, check=False)
        return done.returncode

    assert gated("") == 2  # there is no baseline yet
    assert gated("--update") == 0
    assert gated("") == 0
    for name in ("fsdpcheck.json", "fsdpcheck.html", "fsdpcheck.sarif", "summary.md"):
        assert (tmp_path / name).stat().st_size > 0
    assert gated("--law toy.small") == 1
