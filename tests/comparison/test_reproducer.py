"""Programs that show with torch alone what differs: each ends by 1, and by 0 once the script is right."""

from __future__ import annotations

from contextlib import chdir
from pathlib import Path

import pytest

from fsdpcheck.comparison.command_line import read
from fsdpcheck.comparison.decision import Decision
from fsdpcheck.comparison.facts import Fact
from fsdpcheck.comparison.kept_runs import Runs
from fsdpcheck.comparison.record import Key
from fsdpcheck.comparison.reproducer import NotShown, program
from fsdpcheck.comparison.results import World
from fsdpcheck.comparison.runs import Draws
from fsdpcheck.execution import Failure
from fsdpcheck.simulation.simulate import Options
from tests.common.commands import run
from tests.common.gloo_ranks import launched

_EXAMPLE = "docs/examples/padded_rows.py"
_SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
mistake, way = sys.argv[2:4]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
wrong = mistake if world > 1 and "right" not in sys.argv else ""
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
wrap = dict(ddp=DistributedDataParallel, flat=FullyShardedDataParallel, dtensor=fully_shard, none=lambda whole: whole)
options = dict(device_id=torch.device("cpu"), use_orig_params=False) if way == "flat" else {}
model = wrap[way](model, **options)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999 if wrong != "option" else 0.9))
data = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
mine = data.chunk(world)[rank]
for step in range(3 - (wrong == "steps")):
    loss = model(mine).square().mean() * (world if wrong == "factor" else 1)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def _world(kind: str, name: str, fact: str = "", step: int = 1) -> World:
    """Two ranks that differ in this."""
    key = Key(step, kind, name)
    if fact:
        return World(2, "differs", fact=Fact(1, fact, "", key if name else None))
    return World(2, "differs", first=Decision(key, "differs", 1.0, 0.0, 1.0, 0.0))


CASES = {
    "a gradient": ("factor ddp", _world("gradient", "2.weight"), ", more than "),
    "a parameter of FSDP2": ("factor dtensor", _world("parameter", "2.weight"), ", more than "),
    "a state in a flat parameter": ("factor flat", _world("state exp_avg_sq", "0.weight"), ", more than "),
    "an option": ("option ddp", _world("option betas.1", "0.weight", "option"), "rank 1: [0.9], wanted [0.999]"),
    "steps": ("steps ddp", _world("", "", "steps"), "rank 0: [2.0], wanted [3.0]"),
    "replicas": ("replicas none", _world("gradient", "0.bias", "replicas"), "apart by 0.0"),
}
"""What is sought -> the script's mistake and wrapper, the world, and what is printed."""
BY_DAY = ("a gradient", "a state in a flat parameter", "steps")


def _written(folder: Path, line: str, world: World) -> str:
    with chdir(folder):
        return program(world, Runs(read(line), Options(show=False)))


@pytest.mark.parametrize(
    "sought", [pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY)) for name in CASES]
)
def test_a_program_shows_the_mistake_and_ends_by_0_on_the_right_script(tmp_path: Path, sought: str) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    arguments, world, said = CASES[sought]
    text = _written(tmp_path, f"train.py {{W}} {arguments}", world)
    assert "import fsdpcheck" not in text
    assert "from fsdpcheck" not in text
    code, out = _simulated(tmp_path, text)
    assert (code, said in out) == (1, True), out
    if sought != "replicas":
        code, out = _simulated(tmp_path, text, "right")
        assert code == 0, out


def test_a_seed_that_the_user_says_stands_in_the_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT.replace("torch.manual_seed(0)", "torch.initial_seed()"))
    with chdir(tmp_path):
        runs = Runs(read("train.py {W} factor ddp"), Options(show=False), draws=Draws(seed=3))
        text = program(_world("gradient", "2.weight"), runs)
    assert "np.random.seed(SEED)" in text
    assert "SEED = 3" in text
    code, out = _simulated(tmp_path, text)
    assert (code, ", more than " in out) == (1, True), out


def _simulated(folder: Path, text: str, *more: str) -> tuple[int, str]:
    """Exit code and output of the program on two simulated ranks, its base on one."""
    (folder / "base.py").write_text(text.replace('os.environ["ANSWER"]', "'base.pt'").replace('"ANSWER" not in', "not"))
    (folder / "two.py").write_text(text.replace("of_base())", "torch.load('base.pt'))"))
    if "of_base" in text:
        code, out, _ = run(folder, "simulate", "-n", "1", "base.py", *more)
        assert code == 0, out
    code, out, _ = run(folder, "simulate", "-n", "2", "two.py", *more)
    return code, out


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (World(2, "fails", Failure("deadlock", "")), "torchrun --nproc-per-node 2 train.py 2 factor ddp"),
        (_world("checkpoint", "model.pt:weight"), "a checkpoint is nothing that an optimizer has"),
        (World(2, "differs", warning="BatchNorm has"), "without statistics of batches"),
        (_world("", "", "data"), "data is nothing that an optimizer has"),
        (_world("gradient", "no.such"), "nobody has gradient of no.such at step 1"),
        (_world("initial parameter", "0.weight", step=0), "whose rounding hides it"),
    ],
)
def test_what_no_program_can_show_is_named(tmp_path: Path, world: World, why: str) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    with pytest.raises(NotShown, match=why):
        _written(tmp_path, "train.py {W} factor ddp", world)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "name"), [("gradient", "2.weight"), ("norm", "0")])
def test_processes_show_a_wrong_factor_on_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the program names its script as it was given
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "shown.py").write_text(_written(tmp_path, "train.py {W} factor ddp", _world(kind, name)))
    ran = launched(tmp_path / "shown.py", 2)
    assert (ran.code, ", more than" in ran.printed) == (1, True), ran.printed
    right = launched(tmp_path / "shown.py", 2, "right")
    assert (right.code, ", no more than" in right.printed) == (0, True), right.printed


@pytest.mark.nightly
def test_processes_show_the_mistake_of_the_example_on_processes(tmp_path: Path) -> None:
    file = tmp_path / "shown.py"
    root = Path(__file__).parents[2]
    code, out, _ = run(root, "compare", f"{_EXAMPLE} --batch-size {{12//W}}", "--ranks", "1,2", "--script", str(file))
    assert (code, "torchrun --nproc-per-node 2" in out) == (1, True), out
    with chdir(root):
        ran = launched(file, 2)
        right = launched(file, 2, "--all-tokens")
    assert (ran.code, ", more than" in ran.printed) == (1, True), ran.printed
    assert (right.code, ", no more than" in right.printed) == (0, True), right.printed
