"""Ways of making a gate green that mend nothing: by accident, in a hurry, or by one line that nobody reads. None is 0.

Each is a repository with a baseline, one change of it, and a command as CI runs it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from tests.common import commands

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "data_parallel.py"
pytestmark = [
    pytest.mark.nightly,  # minutes; some of it is seen by day, in tests/cli/test_gate.py and tests/pytest_plugin
    pytest.mark.skipif(not EXAMPLE.is_file(), reason="only a checkout has the documents"),
]

SETTINGS: Final = """[tool.fsdpcheck]
adapter = ["train.py:adapter"]
laws = ["laws.py"]
law = ["training.plain", "mine.*"]
world-size = "1-2"
profile = "quick"
no-confirm = true
jobs = 1
"""
LAWS: Final = '''from fsdpcheck.laws import PLAIN, Violation, law


@law("mine.ends", promise="plain", space=PLAIN)
def ends(case, run):
    """A step comes to its end."""
    if run(case).failure is not None:
        raise Violation("a step does not end", got="a failure", wanted="its end", where="a step")
'''
TESTS: Final = """import fsdpcheck


@fsdpcheck.parametrize_with_laws("train.py:adapter", laws="training.plain,mine.*", laws_from="laws.py", confirm=False)
def test_laws(law):
    law.check()
"""
BASELINE: Final = "fsdpcheck-baseline.json"
GATE: Final = ("-m", "fsdpcheck", "gate")
RUN: Final = (
    *("-m", "fsdpcheck", "run", "--adapter", "train.py:adapter", "--laws", "laws.py", "--world-size", "1-2"),
    *("--profile", "quick", "--no-confirm", "--jobs", "1"),
)
"""Reads no settings: what a gate has in them."""
ALL: Final = ("--law", "training.plain,mine.*")
FEW: Final = ("--law", "mine.*")
TO_IT: Final = ("--baseline", BASELINE)
KEPT: Final = ("--json", "kept.json")
MERGE: Final = ("-m", "fsdpcheck", "merge", "part1.json", "part2.json", *TO_IT)
PYTEST: Final = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--fsdpcheck-baseline", BASELINE, "test_laws.py")
FORGETS: Final = ("            dist.all_reduce(parameter.grad)\n", "")
"""A step whose ranks do not talk: what a gate is there to see."""


@dataclass(frozen=True)
class Way:
    """What somebody does, and how it ends."""

    code: int
    says: str
    command: tuple[str, ...] = GATE
    edits: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """File -> what is replaced by what."""
    environment: Mapping[str, str] = field(default_factory=dict)
    without: str = ""
    """A file that is removed."""
    before: tuple[tuple[str, ...], ...] = ()
    """What ran before that, and ended with 0."""


def _shard(number: int, *words: str) -> tuple[str, ...]:
    return (*RUN, *words, "--shard", f"{number}/2", "--json", f"part{number}.json")


WAYS: Final[dict[str, Way]] = {
    "a law less in the settings": Way(2, "not among the chosen checks", edits={"pyproject.toml": (', "mine.*"', "")}),
    "a law less in the command": Way(2, "not among the chosen checks", (*GATE, "--law", "mine.*")),
    "no such law any more": Way(2, "no law matches", edits={"laws.py": ("mine.ends", "other.ends")}),
    "the file of laws is not named": Way(2, "no law matches", edits={"pyproject.toml": ('laws = ["laws.py"]\n', "")}),
    "a promise is dropped": Way(
        2, "not promised", edits={"train.py": ('promises=frozenset({"plain"})', "promises=frozenset()")}
    ),
    "a trait is accepted no longer": Way(2, "no longer accepts bias", edits={"train.py": ('"bias", ', "")}),
    "a trait is avoided": Way(2, "avoided, and not so", edits={"pyproject.toml": ("jobs", 'avoid = ["bias"]\njobs')}),
    "a trait is avoided in the environment": Way(2, "avoided, and not so", environment={"FSDPCHECK_AVOID": "bias"}),
    "one rank": Way(2, "no case of 2 ranks", edits={"pyproject.toml": ("1-2", "1")}),
    "another adapter": Way(2, "not among the chosen checks", edits={"pyproject.toml": ("train.py:adapter", "ddp")}),
    "the baseline is gone": Way(2, "there is no baseline", without=BASELINE),
    "the baseline has no check": Way(2, "there is no baseline", edits={BASELINE: ('"checks"', '"cheques"')}),
    "a setting is misspelt": Way(2, "no-confirmm", edits={"pyproject.toml": ("no-confirm", "no-confirmm")}),
    "a budget of nothing": Way(4, "budget", (*GATE, "--budget", "0.001")),
    "the step ends the process with 0": Way(
        1, "FINDING", edits={"train.py": ("        self.optimizer.zero_grad()\n", "        import os; os._exit(0)\n")}
    ),
    "the import ends the process with 0": Way(
        2, "train.py", edits={"train.py": ("import torch.distributed as dist\n", "import os\nos._exit(0)\n")}
    ),
    "the import skips the module": Way(
        2, "train.py", edits={"train.py": ("import torch.distributed as dist\n", "raise SystemExit(0)\n")}
    ),
    "Python without asserts": Way(1, "FINDING", edits={"train.py": FORGETS}, environment={"PYTHONOPTIMIZE": "1"}),
    "Python without docstrings": Way(
        2, "run Python without -OO", edits={"train.py": FORGETS}, environment={"PYTHONOPTIMIZE": "2"}
    ),
    "an environment that updates": Way(
        1, "FINDING", edits={"train.py": FORGETS}, environment={"FSDPCHECK_UPDATE": "1"}
    ),
    "an update of what breaks": Way(1, "as it was", (*GATE, "--update"), edits={"train.py": FORGETS}),
    "torchrun of one rank": Way(
        1, "asks for more ranks than torchrun started", ("-m", "torch.distributed.run", "--nproc-per-node", "1", *GATE)
    ),
    "run: a law less than the baseline": Way(2, "not among the chosen checks", (*RUN, *FEW, *TO_IT)),
    "run: a law less than is required": Way(2, "required is", (*RUN, *FEW, "--require", "training.*")),
    "run: a promise is dropped": Way(
        2,
        "not promised",
        (*RUN, *ALL, *TO_IT),
        edits={"train.py": ('promises=frozenset({"plain"})', "promises=frozenset()")},
    ),
    "run: the baseline is gone": Way(2, "there is no baseline", (*RUN, *ALL, *TO_IT), without=BASELINE),
    "run: a law less, in blocks": Way(2, "not among the chosen checks", (*RUN, *FEW, *TO_IT, *KEPT, "--blocks", "2")),
    "resume: a law that was never judged": Way(
        2, "not among the chosen checks", (*RUN, *FEW, *TO_IT, *KEPT, "--resume"), before=((*RUN, *FEW, *KEPT),)
    ),
    "resume: the step was broken since": Way(
        1,
        "FINDING",
        (*RUN, *ALL, *TO_IT, *KEPT, "--resume"),
        edits={"train.py": FORGETS},
        before=((*RUN, *ALL, *KEPT),),
    ),
    "resume: the report of a law is made that of another": Way(
        2,
        "was edited: its checksum is of other content",
        (*RUN, *ALL, *TO_IT, *KEPT, "--resume"),
        edits={"kept.json": ("mine.ends", "training.plain")},
        before=((*RUN, *FEW, *KEPT),),
    ),
    "merge: a shard is missing": Way(2, "1 shard of 2 missing: 2", (*MERGE[:4], *TO_IT), before=(_shard(1, *ALL),)),
    "merge: a law less than the baseline": Way(
        2, "not among the chosen checks", MERGE, before=(_shard(1, *FEW), _shard(2, *FEW))
    ),
    "merge: a law less than is required": Way(
        2, "required is", (*MERGE[:5], "--require", "training.*"), before=(_shard(1, *FEW), _shard(2, *FEW))
    ),
    "merge: a check is taken out of a shard": Way(
        2,
        "was edited: its checksum is of other content",
        MERGE,
        edits={"part1.json": ("mine.ends", "other.ends"), "part2.json": ("mine.ends", "other.ends")},
        before=(_shard(1, *ALL), _shard(2, *ALL)),
    ),
    "pytest: -k chooses one law": Way(1, "not among the chosen checks", (*PYTEST, "-k", "mine.ends")),
    "pytest: a law is deselected": Way(
        1, "not among the chosen checks", (*PYTEST, "--deselect", "test_laws.py::test_laws[training.plain]")
    ),
    "pytest: a hook takes a law away": Way(
        1,
        "1 tests of laws were taken away by a hook of conftest.py: test_laws.py::test_laws[training.plain]",
        PYTEST,
        edits={
            "conftest.py": (
                "",
                "def pytest_collection_modifyitems(items):\n    items[:] = "
                "[item for item in items if 'training.plain' not in item.name]\n",
            )
        },
    ),
    "pytest: a mark that no test has": Way(5, "not among the chosen checks", (*PYTEST, "-m", "slow")),
    "pytest: the test is skipped": Way(
        1,
        "promised checks ran: this is a failure",
        PYTEST,
        edits={"test_laws.py": ("def test", "@__import__('pytest').mark.skip\ndef test")},
    ),
    "pytest: the test may fail": Way(
        1,
        "is marked xfail",
        PYTEST,
        edits={"train.py": FORGETS, "test_laws.py": ("def test", "@__import__('pytest').mark.xfail\ndef test")},
    ),
    "pytest: the test checks nothing": Way(
        1, "was not checked", PYTEST, edits={"test_laws.py": ("law.check()", "pass")}
    ),
    "pytest: the error is swallowed": Way(
        1,
        "its test passed",
        PYTEST,
        edits={
            "train.py": FORGETS,
            "test_laws.py": (
                "    law.check()",
                "    try:\n        law.check()\n    except BaseException:\n        pass",
            ),
        },
    ),
    "pytest: the error becomes a skip": Way(
        1,
        "its test was skipped",
        PYTEST,
        edits={
            "train.py": FORGETS,
            "test_laws.py": (
                "    law.check()",
                "    try:\n        law.check()\n    except BaseException:\n        __import__('pytest').skip('flaky')",
            ),
        },
    ),
    "pytest: without the plugin": Way(4, "unrecognized arguments", (*PYTEST, "-p", "no:fsdpcheck.pytest_plugin")),
    "pytest: in two processes, one law": Way(1, "not among the chosen checks", (*PYTEST, "-n", "2", "-k", "mine.ends")),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is green, by its gate and by its tests."""
    folder = tmp_path_factory.mktemp("repository")
    texts = {"pyproject.toml": SETTINGS, "laws.py": LAWS, "test_laws.py": TESTS, "train.py": EXAMPLE.read_text()}
    for name, text in texts.items():
        (folder / name).write_text(text)
    for command, code in (((*GATE, "--update"), 0), (GATE, 0), (PYTEST, 0)):
        done = _run(folder, command, {})
        assert done.returncode == code, done.stdout + done.stderr
    return folder


def _run(folder: Path, command: tuple[str, ...], more: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {**commands.environment(), **more}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("does", WAYS)
def test_no_way_is_green(does: str, repository: Path, tmp_path: Path) -> None:
    way = WAYS[does]
    folder = Path(shutil.copytree(repository, tmp_path / "copy"))
    for command in way.before:
        done = _run(folder, command, {})
        assert done.returncode == 0, done.stdout + done.stderr
    for name, (old, new) in way.edits.items():
        text = (folder / name).read_text() if (folder / name).exists() else ""
        assert old in text
        (folder / name).write_text(text.replace(old, new))
    if way.without:
        (folder / way.without).unlink()
    done = _run(folder, way.command, way.environment)
    assert (done.returncode, way.says in done.stdout + done.stderr) == (way.code, True), done.stdout + done.stderr
