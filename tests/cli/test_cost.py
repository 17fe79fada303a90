"""``fsdpcheck cost``: what it reads, counts, prints and writes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdpcheck.report.cost import in_bytes, in_seconds
from tests.common.commands import run

_TRAINS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in range(3)))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(int(sys.argv[1])):
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
"""
_NUMBERS = ("--within", "1us,1GB/s", "--between", "10us,100MB/s", "--per-node", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_TRAINS)
    return tmp_path


@pytest.mark.parametrize("values", [(), ("--without-values",)])
def test_a_step_is_counted_as_by_hand(values: tuple[str, ...], folder: Path) -> None:
    """A million float32 a layer: two gathers of 4 MB, the last layer's too, and one reduce-scatter of as much."""
    ranks = ("--ranks", "4,200")
    code, out, err = run(folder, "cost", *ranks, *_NUMBERS, *values, "--json", "cost.json", "train.py", "3")
    assert code == 0, err
    assert out.splitlines()[:4] == [
        "what rank 0 calls in one step, the last of 3",
        "ranks  call            members  through  calls    moved     time",
        "    4  all_gather            4  a node       6    18 MB    18 ms",
        "    4  reduce_scatter        4  a node       3     9 MB  9.01 ms",
    ]
    data = json.loads((folder / "cost.json").read_text())
    few, many = data["worlds"]
    assert (few["ranks"], few["counted"], few["steps"], few["calls"]) == (4, "step", 3, 9)
    assert [(row["op"], row["calls"], row["moved"], row["spans_nodes"]) for row in few["rows"]] == [
        ("all_gather", 6, 6 * 4_000_000 * 3 // 4, False),
        ("reduce_scatter", 3, 3 * 4_000_000 * 3 // 4, False),
    ]
    assert few["seconds"] == pytest.approx(9 * (3e-6 + 3_000_000 / 1e9))
    assert few["rows"][0]["phases"] == {"forward": 3, "backward": 3}
    assert [(row["calls"], row["moved"], row["spans_nodes"]) for row in many["rows"]] == [
        (6, 6 * 4_000_000 * 199 // 200, True),
        (3, 3 * 4_000_000 * 199 // 200, True),
    ]
    assert many["seconds"] == pytest.approx(9 * (199 * 1e-5 + 3_980_000 / 1e8))


def test_without_two_steps_the_whole_run_is_counted_and_trees_are_quicker(folder: Path) -> None:
    ring = run(folder, "cost", "--ranks", "64", "--json", "ring.json", "train.py", "1")
    tree = run(folder, "cost", "--ranks", "64", "--rounds", "tree", "--json", "tree.json", "train.py", "1")
    assert (ring[0], tree[0]) == (0, 0)
    assert ring[1].startswith("what rank 0 calls in the whole run, in which no optimizer steps twice")
    slow, quick = (json.loads((folder / name).read_text())["worlds"][0] for name in ("ring.json", "tree.json"))
    assert slow["counted"] == "run"
    assert slow["seconds"] - quick["seconds"] == pytest.approx(9 * (63 - 6) * 20e-6)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "a script is missing; next: fsdpcheck cost train.py"),
        (("nowhere.py",), "nowhere.py"),
        (("--ranks", "0", "train.py"), "wanted a number of ranks from 1 to 65536"),
        (("--ranks", "12", "--per-node", "8", "train.py", "1"), "ranks do not fill their nodes"),
        (("--within", "fast", "train.py"), "'fast': wanted a latency and a bandwidth above 0, such as 20us,25GB/s"),
        (("--between", "1us,25Gb/s", "train.py"), "wanted a latency and a bandwidth"),
        (("--rounds", "rings", "train.py"), "Did you mean 'ring'?"),
        (("--json", ".", "train.py", "1"), "--json names a folder"),
        (("--within", "1us,0GB/s", "train.py"), "a bandwidth above 0"),
        (("--json", "not/there.json", "train.py", "1"), "--json names a place in a folder that is not there"),
    ],
)
def test_bad_input_is_a_usage_error(arguments: tuple[str, ...], said: str, folder: Path) -> None:
    code, _, err = run(folder, "cost", *arguments)
    assert code == 2
    assert said in err


def test_a_script_that_fails_is_a_finding_and_one_that_wants_another_rank_is_not(folder: Path) -> None:
    (folder / "fails.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n1 / 0\n")
    code, out, _ = run(folder, "cost", "--ranks", "8", "fails.py")
    assert code == 1
    assert "rank 0 of 8: rank 0 raised ZeroDivisionError" in out
    assert ">     3 1 / 0" in out
    (folder / "asks.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "dist.distributed_c10d._get_default_store().get('of rank 1')\n"
    )
    code, out, _ = run(folder, "cost", "--ranks", "8", "asks.py")
    assert code == 2
    assert "rank 0 runs alone, as the first of 8, and waits for what another rank would do" in out
    assert "asks.py:3" in out


def test_what_worlds_before_a_failure_cost_is_kept(folder: Path) -> None:
    (folder / "fails.py").write_text(_TRAINS + "assert dist.get_world_size() < 16\n")
    code, out, _ = run(
        folder, "cost", "--ranks", "8,16", "--within", "0us,1GB/s", "--json", "cost.json", "fails.py", "2"
    )
    assert code == 1
    assert "    8  in all" in out
    assert "rank 0 of 16: rank 0 raised AssertionError" in out
    (kept,) = json.loads((folder / "cost.json").read_text())["worlds"]
    assert (kept["ranks"], kept["seconds"]) == (8, pytest.approx(9 * 3_500_000 / 1e9))


@pytest.mark.parametrize(("number", "said"), [(999.4, "999 B"), (999.6, "1 kB"), (999_700_000, "1 GB"), (0, "0 B")])
def test_bytes_have_three_digits(number: float, said: str) -> None:
    assert in_bytes(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 us"), (0.9997e-3, "1 ms"), (0.01, "10 ms"), (0.9999, "1 s"), (3200, "3,200 s")]
)
def test_seconds_have_three_digits(seconds: float, said: str) -> None:
    assert in_seconds(seconds) == said
