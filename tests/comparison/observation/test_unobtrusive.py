"""A run that is observed is the run that is not: the same calls, bits, random numbers and hand-overs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch.distributed.checkpoint.state_dict  # noqa: F401 - or the first run imports it, which changes warnings

from fsdpcheck.comparison.observation.observer import Observer
from fsdpcheck.comparison.observation.script import ObservedScript
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.simulate import Options, Simulation, simulate_script

DIGEST = """
    import hashlib, random, numpy
    def digest(module):
        def bits(tensor):
            own = getattr(tensor, "_local_tensor", tensor)
            return own.detach().numpy().tobytes()
        found = hashlib.md5()
        for parameter in module.parameters():
            found.update(bits(parameter))
            if parameter.grad is not None:
                found.update(bits(parameter.grad))
        print(found.hexdigest(), torch.rand(2), random.random(), numpy.random.rand())
"""

START = """
    import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    W, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(5 + rank)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.drop = nn.Linear(6, 8), nn.Linear(8, 4), nn.Dropout(0.25)
        def forward(self, x, scale=1.0):
            return self.two(self.drop(self.one(x * scale).relu()))
"""

SHARDED = """
    from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
    from torch.utils.checkpoint import checkpoint
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.one, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            F.cross_entropy(model(torch.randn(4, 6), scale=torch.rand(4, 1)).float(), torch.randint(4, (4,))).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
        optimizer.step()
        optimizer.zero_grad(set_to_none=rank == 0)
    dcp.save({"model": get_model_state_dict(model), "optimizer": optimizer.state_dict()}, checkpoint_id="saved")
    digest(model)
"""

REPLICATED = """
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    class Operations(TorchDispatchMode):
        seen = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))
    class Functions(TorchFunctionMode):
        seen = 0
        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.utils.checkpoint import checkpoint
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)
    model = nn.parallel.DistributedDataParallel(Checkpointed())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(2):
      with Operations() as operations, Functions() as functions:
          with model.no_sync():
              nn.MSELoss()(model(torch.randn(4, 6)), torch.randn(4, 4)).backward()
          model(torch.randn(4, 6)).sum().backward()
          nn.utils.clip_grad_norm_(model.parameters(), 0.1)
          optimizer.step()
          optimizer.zero_grad()
      print(operations.seen, functions.seen)
    torch.save(model.state_dict(), f"model{rank}.pt")
    digest(model)
"""

TENSOR_PARALLEL = """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    plan = {"one": ColwiseParallel(), "two": RowwiseParallel()}
    model = parallelize_module(Net(), init_device_mesh("cpu", (W,)), plan)
    flat = FSDP(Net(), device_id=torch.device("cpu"), use_orig_params=True)
    for net in (model, flat):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
        for _ in range(2):
            net(torch.ones(2, 6)).sum().backward()
            if net is flat:
                flat.clip_grad_norm_(0.5)
            optimizer.step()
        digest(net)
"""


def _run(folder: Path, source: str, observed: bool) -> tuple[Simulation, Observer]:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(START) + textwrap.dedent(DIGEST) + textwrap.dedent(source))
    plain, observer = script.of_file(path, []), Observer()
    with observer.installed():
        program = ObservedScript(plain, observer) if observed else plain
        return simulate_script(program, 2, Options(show=False)).check(), observer


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(SHARDED, id="sharded"),
        pytest.param(REPLICATED, id="replicated"),
        pytest.param(TENSOR_PARALLEL, id="tensor-parallel", marks=pytest.mark.nightly),
    ],
)
def test_nothing_is_added_and_nothing_changes(tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (alone, _), (observed, observer) = (_run(tmp_path, source, seen) for seen in (False, True))
    assert observed.printed == alone.printed
    assert all("tensor(" in text for text in alone.printed)
    assert observed.traces == alone.traces
    for mine, theirs in zip(observed.traces, alone.traces, strict=True):
        assert [(call.about, call.phase, call.where) for call in mine] == [
            (call.about, call.phase, call.where) for call in theirs
        ]
    assert observed.hand_overs == alone.hand_overs
    assert observed.voids == alone.voids
    assert (observed.shared, observed.notes, observed.left) == (alone.shared, alone.notes, alone.left)
    assert all(record.pieces for record in observer.records.values())
    assert {note for record in observer.records.values() for note in record.notes} == set()
