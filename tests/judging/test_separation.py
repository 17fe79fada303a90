"""Judge and judged share no process: whatever an implementation does to its own, what is said of it is not changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fsdpcheck.engines._common import hosts
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from tests.common.commands import LAWS, TOYS, environment
from tests.common.commands import run as run_command

_PROGRAM = """
import sys
from fsdpcheck.engines._common import hosts
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run

for ref in sys.argv[1:]:
    run = Run(SimulatedEngine(), ref)
    print(check_law(chapters()["training.plain"], run, world_sizes=(2,), most=2, shrink=False).status)
theirs = ("fsdpcheck.impl", "fsdpcheck.adapters.builtin", "fsdpcheck_file_", "unsharded")
print([name for name in sys.modules if name.startswith(theirs)])
"""


def test_no_implementation_is_ever_imported_where_it_is_judged(tmp_path: Path) -> None:
    """Neither a built-in one nor a user's; and a program without a main guard may ask."""
    refs = ("reference", f"{TOYS / 'unsharded.py'}:adapter")
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    done = subprocess.run([sys.executable, program, *refs], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines() == ["holds", "finding", "[]"], done.stderr


def test_an_implementation_that_replaces_every_function_it_can_reach_is_found(engine: SimulatedEngine) -> None:
    run = Run(engine, f"{TOYS / 'patching_everything.py'}:adapter")
    for law in ("training.plain", "training.gradients" if "grads" in run.features.observables else "training.plain"):
        verdict = check_law(chapters()[law], run, world_sizes=(2,), most=2, shrink=False)
        assert verdict.status == "finding", verdict.reason
        assert verdict.finding is not None
        assert verdict.finding.kind == "value", verdict.finding.got


def test_features_that_are_no_plain_data_are_told(tmp_path: Path) -> None:
    toy = (TOYS / "unsharded.py").read_text().replace('"a toy has no secrets"', "str")
    (tmp_path / "hiding.py").write_text(toy)
    with pytest.raises(AdapterError, match=r"its name or features are no plain data: got an object of builtins.str"):
        hosts.declared(f"{tmp_path / 'hiding.py'}:adapter")


@pytest.mark.parametrize(
    ("dies", "how"),
    [pytest.param("ctypes.string_at(0)", "SIGSEGV", marks=pytest.mark.nightly), ("os.abort()", "code 134")],
)
def test_ranks_that_end_their_process_are_a_finding_with_its_smallest_case(
    engine: SimulatedEngine, tmp_path: Path, dies: str, how: str
) -> None:
    """The judge starts another for the next case."""
    first = "self.optimizer.zero_grad()"
    toy = (TOYS / "unsharded.py").read_text().replace(first, f"{first}, self.setup.world_size > 1 and {dies}")
    (tmp_path / "dying.py").write_text(f"import ctypes, os\n{toy.replace('from __future__ import annotations', '')}")
    run = Run(engine, f"{tmp_path / 'dying.py'}:adapter")
    found = check_law(chapters()["training.plain"], run, world_sizes=(1, 2)).finding
    assert found is not None
    assert found.kind in ("lost", "exited")
    assert how in found.got
    assert "W = 2; a batch of 1 samples" in found.words


@pytest.mark.nightly
def test_laws_beside_an_implementation_are_no_laws_and_are_named(tmp_path: Path) -> None:
    """They would judge in its own process, or not at all."""
    laws = Path(LAWS).read_text().replace("toy.", "beside.")
    toy = (TOYS / "unsharded.py").read_text().replace("from __future__ import annotations", "")
    (tmp_path / "both.py").write_text(laws + toy)
    code, out, err = run_command(tmp_path, "run", "--adapter", "both.py:adapter", "--law", "training.plain")
    assert code == 2
    for words in ("adapter 'both.py:adapter' stands in one file with laws", "beside.completes", "--laws FILE.py"):
        assert words in out + err
