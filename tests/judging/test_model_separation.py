"""Nobody who judges imports a user's model: whatever it does to its own process, what is said is not changed by it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import NoProgress, UsageError
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import model_process
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.processes.limit import Limit
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.run import run_session
from tests.common.commands import TOYS, environment

_MODEL = """
import ctypes, os, sys
sys.path.append({toys!r})
import torch
from own_models import Net, batch
from replacing import replace_everything

def judged():
    return os.path.exists(os.path.join(os.path.dirname(__file__), "inspected"))

class Mine(Net):
    def forward(self, x):
        {forward}
        return super().forward(x)

def build():
    return Mine()

{imported}
"""
_CHECKS_REPLACED = """
from fsdpcheck.checks import shape_matched_clipping as checks
for name in [name for name in vars(checks) if name.startswith("assert_")]:
    setattr(checks, name, lambda *_, **__: None)
torch.equal = torch.allclose = lambda *_, **__: True
"""


def _model(folder: Path, imported: str = "", forward: str = "pass") -> str:
    (folder / "mine.py").write_text(_MODEL.format(toys=str(TOYS), imported=imported, forward=forward))
    return f"{folder / 'mine.py'}"


def _verdict(engine: SimulatedEngine, file: str, law: str = "training.plain", fault: str = "averaged_twice") -> Verdict:
    """Of a law that an implementation with the fault breaks."""
    own = model_process.inspected(f"{file}:build", f"{file}:batch", "", None).own
    Path(file).with_name("inspected").touch()
    run = Run(engine, "reference", (f"fsdpcheck.impl.faults:{fault}",), own=own)
    return check_law(chapters()[law], run, world_sizes=(2,), most=3, shrink=False)


def _imported(folder: Path) -> list[str]:
    """Modules of this process that were loaded from ``folder``."""
    return [name for name, one in sys.modules.items() if str(getattr(one, "__file__", "")).startswith(str(folder))]


@pytest.mark.parametrize(
    ("law", "fault", "imported"),
    [
        ("training.plain", "averaged_twice", "replace_everything(code=False)"),
        ("rounding.clip-factors", "nothing_is_clipped", _CHECKS_REPLACED),
    ],
)
def test_what_an_import_replaces_by_name_is_taken_back_and_a_fault_is_found(
    engine: SimulatedEngine, tmp_path: Path, law: str, fault: str, imported: str
) -> None:
    known = torch.equal, check_law.__code__
    verdict = _verdict(engine, _model(tmp_path, imported), law, fault)
    assert verdict.status == "finding", verdict.reason
    assert verdict.finding is not None
    assert verdict.finding.kind == "value", verdict.finding.got
    assert any("torch.equal replaced" in sentence for sentence in verdict.left)
    assert (torch.equal, check_law.__code__) == known
    assert not _imported(tmp_path)


def test_an_import_that_cannot_be_taken_back_is_refused(engine: SimulatedEngine, tmp_path: Path) -> None:
    file = _model(tmp_path, "replace_everything()")
    with pytest.raises(UsageError) as refused:
        _verdict(engine, file)
    for words in (
        "your model changed what its answer is computed and judged with\n",
        "has other code",
        f"model '{file}:build', batch '{file}:batch'",
        "no implementation is blamed",
    ):
        assert words in str(refused.value)
    assert not _imported(tmp_path)


@pytest.mark.parametrize("code", [False, True])
def test_a_forward_that_replaces_what_judges_is_refused(engine: SimulatedEngine, tmp_path: Path, code: bool) -> None:
    verdict = _verdict(engine, _model(tmp_path, forward=f"judged() and replace_everything({code})"))
    assert (verdict.status, verdict.exit_code, verdict.finding) == ("error", 2, None)
    assert "your model changed what its answer is computed and judged with\n  got     fsdpcheck." in verdict.reason
    assert "replay with: fsdpcheck replay" in verdict.reason


def test_a_forward_that_replaces_a_function_of_torch_is_refused(engine: SimulatedEngine, tmp_path: Path) -> None:
    forward = "if judged(): torch.equal = lambda *_: True"
    verdict = _verdict(engine, _model(tmp_path, forward=forward))
    assert (verdict.status, verdict.exit_code, verdict.finding) == ("error", 2, None)
    assert "got     torch.equal replaced by fsdpcheck_file_mine" in verdict.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [("b''", "it is no message: EOFError"), ("pickle.dumps(None)", "an answer of NoneType"), ("None", "TypeError")],
)
def test_an_answer_that_is_none_is_no_verdict(engine: SimulatedEngine, tmp_path: Path, given: str, said: str) -> None:
    imported = "import pickle\nfrom fsdpcheck.processes import messages"
    verdict = _verdict(engine, _model(tmp_path, imported, f"if judged(): messages.dumps = lambda _: {given}"))
    assert (verdict.status, verdict.exit_code) == ("error", 2), verdict.reason
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("dies", "how"),
    [("os._exit(3)", "code 3"), pytest.param("ctypes.string_at(0)", "SIGSEGV", marks=pytest.mark.nightly)],
)
def test_a_model_that_ends_its_process_is_told(engine: SimulatedEngine, tmp_path: Path, dies: str, how: str) -> None:
    """When it is imported; and in a forward, also where ranks come to it first."""
    file = _model(tmp_path, dies)
    with pytest.raises(UsageError, match=f"(?s)your model ended its process.*got .*{how}.*where .*{file}:build"):
        _verdict(engine, file)
    for law in ("training.plain", "rounding.clip-factors"):
        folder = tmp_path / law
        folder.mkdir()
        verdict = _verdict(engine, _model(folder, forward=f"judged() and {dies}"), law)
        assert (verdict.status, verdict.exit_code, verdict.finding) == ("error", 2, None)
        assert how in verdict.reason
        assert "your model ended its process, in which the single device computes" in verdict.reason


def test_the_session_goes_on_with_another_process(engine: SimulatedEngine, tmp_path: Path) -> None:
    file, laws = _model(tmp_path, forward="judged() and os._exit(3)"), ("training.plain", "training.gradients")
    told: list[dict[str, Any]] = []

    def tell(event: dict[str, Any]) -> None:
        told.append(event)
        (tmp_path / "inspected").touch()

    plan = Plan(("reference",), laws, world_sizes=(2,), model=f"{file}:build", batch=f"{file}:batch")
    run_session(plan, tell, engine=engine)
    statuses = [(event["law"], event["status"]) for event in told if event["event"] == "verdict"]
    assert statuses == [(law, "error") for law in laws]


@pytest.mark.nightly
def test_a_forward_that_never_ends_is_ended(
    engine: SimulatedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpcheck.processes.remote.Limit", lambda *_: Limit(5.0, 0.0))
    with pytest.raises(NoProgress, match=r"(?s)no progress: .*mine.py\", line \d+ in forward"):
        _verdict(engine, _model(tmp_path, forward="while True: pass"))


_PROGRAM = """
import sys
from fsdpcheck.session.plan import Plan
from fsdpcheck.session.run import run_session
from tests.common.commands import LAWS

file = sys.argv[1]
laws = ("training.plain", "rounding.gradients", "toy.completes")
for real in (False, True):
    own = dict(model=f"{file}:build", batch=f"{file}:batch", real=real, laws_from=(LAWS,))
    chosen = laws[1:2] if real else (laws[0], laws[2])
    told = []
    run_session(Plan(("fully_shard",), chosen, world_sizes=(2,), **own), told.append)
    print([event["status"] for event in told if event["event"] == "verdict"])
    files = next(event["sources"]["files"] for event in told if event["event"] == "plan")
    print([path for path in files if path.endswith("mine.py")] == [file])
print([name for name in sys.modules if name.startswith(("fsdpcheck_file_mine", "own_models"))])
"""


def test_no_model_is_ever_imported_where_it_is_judged(tmp_path: Path) -> None:
    """Its files are known all the same; and a law of a user's own judges it."""
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    path = {"PYTHONPATH": f"{environment()['PYTHONPATH']}:{TOYS.parents[1]}"}
    command = [sys.executable, program, _model(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment(), **path})
    assert done.stdout.splitlines() == ["['holds', 'holds']", "True", "['holds']", "True", "[]"], done.stderr
