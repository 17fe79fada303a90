"""The honest scripts on simulated ranks and in processes on gloo: the same bits after each step of each optimizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("benchmarks.compared.honest", reason="only a checkout has the benchmarks")
from benchmarks.compared.honest import HONEST, Honest
from tests.common.commands import environment, run

_WATCHED = """
import hashlib, os, runpy, sys, threading
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

ours, digest, steps = threading.get_ident(), hashlib.sha256(), []

def keep(optimizer, *_):
    if threading.get_ident() != ours:
        return
    steps.append(type(optimizer).__name__)
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        value = parameter.detach()
        value = value.to_local() if hasattr(value, "to_local") else value
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

register_optimizer_step_post_hook(keep)
if "LEAVE" in os.environ:  # processes of gloo sometimes abort as their group is destroyed, or as they end
    torch.distributed.destroy_process_group = lambda *group: None
del sys.argv[0]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
with open(f"{os.environ['FOLDER']}/{os.environ['RANK']}", "w") as file:
    file.write(f"{len(steps)} steps: {digest.hexdigest()}")
if "LEAVE" in os.environ:
    os._exit(0)
"""


def _digests(folder: Path) -> list[str]:
    return [(folder / str(rank)).read_text() for rank in range(2)]


@pytest.mark.nightly
@pytest.mark.parametrize("script", HONEST, ids=lambda one: one.name)
def test_every_step_has_the_bits_that_it_has_on_gloo(
    script: Honest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (watched := tmp_path / "watched.py").write_text(_WATCHED)
    words = [str(watched), str(script.path), *script.arguments(2)]
    for name in ("simulated", "gloo"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FOLDER", str(tmp_path / "simulated"))
    code, out, err = run(tmp_path / "simulated", "simulate", "-n", "2", *words)
    assert code == 0, out + err
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    variables = {**environment(), "FOLDER": str(tmp_path / "gloo"), "LEAVE": "1"}
    done = subprocess.run(command, cwd=tmp_path / "gloo", env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert _digests(tmp_path / "simulated") == _digests(tmp_path / "gloo")
    assert not _digests(tmp_path / "gloo")[0].startswith("0 steps")
