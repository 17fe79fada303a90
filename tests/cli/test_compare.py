"""``fsdpcheck compare``: what it says of scripts, its exit codes, and its bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpcheck import cli
from fsdpcheck.errors import UsageError
from tests.common.commands import run

_SCRIPT = """
import argparse, os, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--width", type=int, default=4)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(3, args.width), nn.Tanh(), nn.Linear(args.width, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
target = torch.randn(24, 2, generator=torch.Generator().manual_seed(2))
for step in range(3):
    begin = (step * world + rank) * args.batch_size % 24
    x, y = data[begin : begin + args.batch_size], target[begin : begin + args.batch_size]
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    # HERE
    optimizer.step()
dist.destroy_process_group()
"""
NIGHT = pytest.mark.nightly
_LINE = "train.py --batch-size {8//W}"
_BY_HAND = "    for p in model.parameters(): p.data -= 0.1 * p.grad"
_NORMALIZED = ("nn.Tanh()", "nn.BatchNorm1d(args.width), nn.Tanh()")


def _write(folder: Path, *changes: tuple[str, str]) -> Path:
    text = _SCRIPT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (folder / "train.py").write_text(text)
    return folder


def test_under_torchrun_it_says_that_its_ranks_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = cli._parser().parse_args(["compare", "no_such_script.py"])
    assert options.ranks == (1, 2)
    with pytest.raises(UsageError, match="no_such_script"):
        options.command(options)
    assert "compare simulates its ranks, all of them in rank 0 of torchrun" in capsys.readouterr().err


def test_ranks_that_do_what_one_does_agree_at_a_resolution_that_is_printed(tmp_path: Path) -> None:
    code, out, err = run(_write(tmp_path), "compare", _LINE, "--ranks", "1,2,4", "--json", "out.json")
    assert code == 0, out + err
    assert [line.partition(":")[0] for line in out.splitlines()[:2]] == [
        "2 ranks agree with one rank",
        "4 ranks agree with one rank",
    ]
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["says"], data["exit_code"], data["steps"]) == ("agrees", 0, 3)
    assert all(0 < world["resolution"] < 2.0**-23 and world["observables"] == 64 for world in data["worlds"])


def test_gradients_of_which_none_is_anything_but_zero_are_told(tmp_path: Path) -> None:
    code, out, _ = run(_write(tmp_path, ("loss = ", "loss = 0.0 * ")), "compare", _LINE, "--ranks", "1,2")
    assert code == 0
    assert "  note    every gradient is zero on one rank, so that no mistake in gradients shows" in out.splitlines()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("# HERE", "[p.grad.mul_(world) for p in model.parameters()]"), "it is W = 2 times that of one rank"),
        pytest.param(
            ("model = DistributedDataParallel(nn.Sequential", "model = nn.Sequential"),
            "nothing reduces them",
            marks=NIGHT,
        ),
        pytest.param(("(step * world + rank)", "(step * world)"), "are not those of one rank", marks=NIGHT),
        (("lr=0.01", "lr=0.01 * world"), "lr of 0.weight is 0.02 on rank 0 at step 0, where one rank has 0.01"),
        pytest.param(
            ("    loss = ", "    x = torch.rand(len(x), 3) + rank\n    loss = "),
            "(4 of rank 1), which one rank never",
            marks=NIGHT,
        ),
        pytest.param(
            ("manual_seed(2))", "manual_seed(2 + rank))"), "labels at step 0 are not those of one rank", marks=NIGHT
        ),
        (("range(3)", "range(3 - (world == 2))"), "rank 0 makes 2 steps, where one rank makes 3 steps"),
        (("lr=0.01", "lr=0.01, eps=1e-8 * (1 + 1e-5 * rank)"), "eps of 0.weight is"),
    ],
)
def test_a_mistake_about_ranks_is_found_and_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    if "Sequential" in change[0]:
        change = (change[0] + "(nn.Linear(3, args.width), nn.Tanh(), nn.Linear(args.width, 2)))",
                  change[1] + "(nn.Linear(3, args.width), nn.Tanh(), nn.Linear(args.width, 2))")  # fmt: skip
    code, out, err = run(_write(tmp_path, change), "compare", _LINE, "--ranks", "1,2")
    assert code == 1, out + err
    assert said in out


@pytest.mark.nightly
def test_a_seed_makes_a_script_that_draws_from_the_system_one_to_compare(tmp_path: Path) -> None:
    folder = _write(tmp_path, ("manual_seed(0)", "initial_seed()"))
    code, out, _ = run(folder, "compare", _LINE, "--ranks", "1,2")
    assert (code, "or have it done: --seed 0" in out) == (4, True), out
    code, out, err = run(folder, "compare", _LINE, "--ranks", "1,2", "--seed", "7")
    assert (code, "2 ranks agree with one rank" in out) == (0, True), out + err
    code, _, err = run(folder, "compare", _LINE, "--seed", "-1")
    assert (code, "wanted a whole number from 0 to 2**32 - 1" in err) == (2, True), err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("# HERE", "raise ValueError('no')")], "nothing compared: the script fails on one rank"),
        ([("manual_seed(0)", "seed()")], "nothing compared: the script is not deterministic: run twice on one rank"),
        ([("optimizer.step()", "pass")], "nothing compared: no optimizer made a step on one rank"),
        (
            [("    optimizer.step()", _BY_HAND)],
            "4 parameters changed, of shape (4, 3) say, and no step of an optimizer",
        ),
        ([("# HERE", "input('go on? ')")], "a rank reads from stdin, and simulated ranks have none"),
        ([("# HERE", "os.sys.exit(3)")], "exited with code 3, at train.py:23"),
        ([("parse_args()", "parse_args(['--lr', '1'])")], "train.py: error: unrecognized arguments: --lr 1"),
        (
            [("# HERE", "if world < 2: raise ValueError('no pipeline')")],
            "compare with the fewest that can: --ranks 2,4",
        ),
    ],
)
def test_a_script_that_is_nothing_to_compare_with_is_named_and_code_4(
    tmp_path: Path, changes: list[tuple[str, str]], said: str
) -> None:
    code, out, _ = run(_write(tmp_path, *changes), "compare", _LINE, "--ranks", "1,2")
    assert (code, said in out) == (4, True), out


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_NORMALIZED, "warning BatchNorm has statistics of each rank's own rows, at train.py:20:"),
        (("nn.Tanh()", "nn.Dropout(0.5), nn.Tanh()"), "note    dropout is off at train.py:20 (3 times)"),
    ],
)
def test_what_depends_on_the_number_of_ranks_by_design_is_told_with_its_line_and_the_rest_is_compared(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    code, out, err = run(_write(tmp_path, change), "compare", _LINE, "--ranks", "1,2")
    assert (code, said in out) == (0, True), out + err


@pytest.mark.nightly
def test_a_mistake_beside_statistics_of_a_batch_is_found_and_both_are_named(tmp_path: Path) -> None:
    folder = _write(tmp_path, _NORMALIZED, ("# HERE", "[p.grad.mul_(world) for p in model.parameters()]"))
    code, out, err = run(folder, "compare", _LINE, "--ranks", "1,2")
    assert code == 1, out + err
    assert "it is W = 2 times that of one rank, as 6 of 6 are" in out
    assert "warning BatchNorm has statistics of each rank's own rows, at train.py:20:" in out


@pytest.mark.nightly
def test_where_rounding_decides_between_tied_values_the_operator_and_its_line_are_told() -> None:
    folder = Path(__file__).parents[1] / "public_bugs"
    code, out, err = run(folder, "compare", "megatron_router_counts.py --form correct", "--ranks", "1,2")
    assert code == 4, out + err
    assert "of the 288 values that argmax gives at megatron_router_counts.py:33 on rank 0" in out


@pytest.mark.nightly
def test_a_world_that_one_rank_cannot_run_is_compared_with_a_larger_one(tmp_path: Path) -> None:
    folder = _write(tmp_path, ("# HERE", "if world < 2: raise ValueError('no pipeline')"))
    code, out, err = run(folder, "compare", _LINE, "--ranks", "2,4")
    assert code == 0, out + err
    assert out.startswith("4 ranks agree with 2 ranks: 3 steps, 64 observables")


@pytest.mark.nightly
def test_what_ranks_and_their_processes_print_does_not_reach_the_report(tmp_path: Path) -> None:
    printing = "print('line ' * 10000); import subprocess; subprocess.run(['echo', 'line'], check=True)"
    code, out, err = run(_write(tmp_path, ("# HERE", printing)), "compare", _LINE, "--ranks", "1,2")
    assert (code, "line" in out + err) == (0, False), out + err


@pytest.mark.nightly
def test_a_module_of_a_package_is_compared_as_a_script_is(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    (_write(folder) / "__init__.py").touch()
    code, out, err = run(tmp_path, "compare", "-m package.train --batch-size {8//W}", "--ranks", "1,2")
    assert (code, out.startswith("2 ranks agree with one rank")) == (0, True), out + err


def test_a_syntax_error_is_told_with_its_line_and_a_caret(tmp_path: Path) -> None:
    code, _, err = run(_write(tmp_path, ("# HERE", "if rank = 1: pass")), "compare", _LINE)
    assert code == 2
    assert "where   train.py:23\n        if rank = 1: pass\n           ^" in err


def test_a_script_that_hangs_on_more_ranks_is_a_finding_with_the_report_of_the_hang(tmp_path: Path) -> None:
    folder = _write(tmp_path, ("# HERE", "rank and dist.barrier()"))
    code, out, _ = run(folder, "compare", _LINE, "--ranks", "1,2")
    assert code == 1
    assert "2 ranks fail where one rank comes to the end" in out
    assert "train.py" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train.py --batch-size {8//W}", "--ranks", "1,3"), "8 is not divided by 3"),
        (("train.py --batch-size {8//X}",), "braces hold arithmetic over W"),
        (("nowhere.py",), "there is no script 'nowhere.py'"),
        (("-m package.nowhere",), "there is no module 'package.nowhere'"),
        (("train.py", "--ranks", "2"), "--ranks names the numbers of ranks to compare"),
        (("train.py", "--ranks", "1,1"), "--ranks names the numbers of ranks to compare"),
        (("train.py", "--ranks", "1,x"), "wanted numbers of ranks"),
        (("train.py", "--false-alarm", "2"), "wanted a probability between 0 and 1"),
        (("train.py", "--json", "no/where.json"), "--json names a place in a folder that is not there"),
        (("train.py", "--script", "no/where.py"), "--script names a place in a folder that is not there"),
        (("train.py", "--script", "."), "--script names a place in a folder that is not there, or a folder"),
    ],
)
def test_a_command_that_cannot_be_run_is_code_2(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, _, err = run(_write(tmp_path), "compare", *words)
    assert (code, said in err) == (2, True), err


@pytest.mark.nightly
def test_a_program_is_written_where_something_differs_and_nothing_where_not(tmp_path: Path) -> None:
    code, out, _ = run(_write(tmp_path), "compare", _LINE, "--ranks", "1,2", "--script", "shown.py")
    assert (code, out.splitlines()[-1]) == (0, "script: nothing differs, so shown.py is not written")
    assert not (tmp_path / "shown.py").exists()
    _write(tmp_path, ("lr=0.01", "lr=0.01 * world"))
    code, out, _ = run(tmp_path, "compare", _LINE, "--ranks", "1,2", "--script", "shown.py")
    assert (code, out.splitlines()[-1]) == (1, "script: torchrun --nproc-per-node 2 shown.py")
    assert "option lr of 0.weight at step 0" in (tmp_path / "shown.py").read_text()


@pytest.mark.nightly
def test_what_is_exact_is_counted_and_where_it_ends_is_said(tmp_path: Path) -> None:
    changes = ("nn.Tanh()", "nn.ReLU()"), ("AdamW(model.parameters(), lr=0.01)", "SGD(model.parameters(), lr=0.5)")
    folder = _write(tmp_path, *changes, ("nn.functional.mse_loss(model(x), y)", "(model(x) * y).sum() * (world / 8)"))
    code, out, err = run(folder, "compare", _LINE, "--ranks", "1,2", "--exact", "--json", "out.json")
    assert code == 0, out + err
    (world,) = json.loads((tmp_path / "out.json").read_text())["worlds"]
    assert 8 <= world["exact"] <= world["observables"] == 28
    assert f"  exact   {world['exact']} of 28 observables are proved exact: every bit counts" in out
    assert ("  ended   by aten." in out) == (world["exact"] < 28) == bool(world["exact_up_to"])


@pytest.mark.nightly
def test_what_one_run_writes_is_not_what_the_next_run_reads(tmp_path: Path) -> None:
    save = "if step == 1 and os.path.exists('now'): raise SystemExit(9)\n    if step == 2: open('now', 'w').close()"
    code, out, _ = run(_write(tmp_path, ("# HERE", save)), "compare", _LINE, "--ranks", "1,2")
    assert code == 0, out
    assert not (tmp_path / "now").exists()


@pytest.mark.nightly
def test_numbers_with_a_name_are_made_smaller_while_it_differs_alike(tmp_path: Path) -> None:
    folder = _write(tmp_path, ("lr=0.01", "lr=0.01 * (world if args.width > 2 else 1)"))
    line = "train.py --batch-size {8//W} --width {width:8}"
    code, out, _ = run(folder, "compare", line, "--ranks", "1,2", "--json", "out.json")
    assert code == 1
    assert out.splitlines()[-2:] == [
        "smaller: it differs alike with width = 4, 3 tried",
        "  fsdpcheck compare 'train.py --batch-size {8//W} --width {width:4}' --ranks 1,2",
    ]
    assert json.loads((tmp_path / "out.json").read_text())["smaller"]["numbers"] == {"width": 4}


def test_arguments_outside_the_quotes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["compare", "train.py", "--batch-size", "{16//W}"])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert "unrecognized arguments: --batch-size {16//W}" in said
    assert "fsdpcheck compare 'train.py ...' --ranks 1,2,4" in said
    with pytest.raises(SystemExit):
        cli.main(["power", "--nonesuch"])
    assert "fsdpcheck compare" not in capsys.readouterr().err
