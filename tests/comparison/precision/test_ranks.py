"""Arithmetics on simulated ranks: sharded and replicated scripts are raised whole, and replicas keep equal noise."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.entrances import installed
from fsdpcheck.comparison.precision.entry import in_arithmetic
from fsdpcheck.simulation.current_rank import require_rank
from fsdpcheck.simulation.programs.script import Script, of_file
from fsdpcheck.simulation.simulate import Options, simulate_script

BEGIN = """
import hashlib, sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
native = "native" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(0.5 * (not native)))
x, y = torch.randn(2, 3, 4 * size, 8).chunk(size, 2)[rank]
if native:
    model, x, y = model.double(), x.double(), y.double()
"""
END = """
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for inputs, labels in zip(x, y):
    loss = (model(inputs).float() - labels).square().mean() if not native else (model(inputs) - labels).square().mean()
    loss.backward()
    norm = clip(1.0)
    optimizer.step()
    optimizer.zero_grad()
values = [*whole(), norm.full_tensor() if hasattr(norm, "full_tensor") else norm]
assert not native or all(value.dtype is torch.float64 for value in values)
print(values[0].dtype, hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest())
dist.destroy_process_group()
"""
CLIP = "clip = lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)\n"
SHARDED = f"""
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
low = {{}} if native else dict(mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
for layer in (model[0], model[2], model):
    fully_shard(layer, **low)
whole = lambda: [value.full_tensor() for value in model.parameters()]
{CLIP}"""
FLAT = """
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
low = {} if native else dict(mixed_precision=MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16))
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, **low)
def clip(most):  # that of FSDP refuses float64
    return torch.zeros((), dtype=torch.float64) if native else 0 * model.clip_grad_norm_(1e9)
def whole():
    with FullyShardedDataParallel.summon_full_params(model):
        return [value.detach().clone() for value in model.parameters()]
"""
CLIPPED = """
from torch.distributed.fsdp import FullyShardedDataParallel
model = nn.Linear(2, 1, bias=False)
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
model(torch.tensor([[3 * (1 + 2**-24), 4 * (1 + 2**-24)]])).sum().backward()
print(float(model.clip_grad_norm_(1e9)).hex())
"""
REPLICATED = f"""
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(model)
def compressed(state, bucket):
    buffer = bucket.buffer()
    sent = buffer.to(torch.float16).div_(size) if not native else buffer / size
    work = dist.all_reduce(sent, async_op=True).get_future()
    return work.then(lambda done: buffer.copy_(done.value()[0]))
model.register_comm_hook(None, compressed)
whole = model.parameters
{CLIP}"""
TENSOR_PARALLEL = f"""
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
parallelize_module(model, init_device_mesh("cpu", (size,)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
whole = lambda: [value.full_tensor() for value in model.parameters()]
x, y = x.contiguous(), y.contiguous()
dist.broadcast(x, 0), dist.broadcast(y, 0)
{CLIP}"""
SCRIPTS = {"FSDP2": SHARDED, "FSDP1": FLAT, "DDP": REPLICATED, "tensor parallel": TENSOR_PARALLEL}


class Entered:
    """A script, run in an arithmetic on each rank."""

    def __init__(self, script: Script, arithmetic: Arithmetic) -> None:
        self.script, self.arithmetic, self.notes = script, arithmetic, Counter[str]()
        self.main: Callable[[int], ModuleType] = script.main

    def run(self) -> None:
        with in_arithmetic(self.arithmetic, self.notes, require_rank()):
            self.script.run()


def ran(path: Path, arithmetic: Arithmetic | None, size: int, *args: str) -> tuple[tuple[str, ...], Counter[str]]:
    script = of_file(path, args)
    if arithmetic is None:
        return simulate_script(script, size, Options(show=False)).check().printed, Counter()
    entered = Entered(script, arithmetic)
    with installed():
        printed = simulate_script(entered, size, Options(show=False)).check().printed  # type: ignore[arg-type]
    return printed, entered.notes


@functools.cache
def expected(path: Path, size: int) -> tuple[str, ...]:
    return ran(path, None, size, "native")[0]


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(BEGIN + SCRIPTS[request.param] + END, encoding="utf-8")
    return path


NIGHT, LATER = pytest.mark.nightly, ("FSDP1", "tensor parallel")


@pytest.mark.parametrize("size", [2, pytest.param(1, marks=NIGHT)])
@pytest.mark.parametrize(
    "script",
    ["FSDP2", "DDP", pytest.param("FSDP1", marks=NIGHT), pytest.param("tensor parallel", marks=NIGHT)],
    indirect=True,
)
def test_a_script_on_ranks_is_raised_to_what_it_is_in_float64(script: Path, size: int) -> None:
    printed, notes = ran(script, Arithmetic("float64"), size)
    assert printed == expected(script, size)
    assert not [note for note in notes if note.startswith("low precision")]
    assert sum(count for note, count in notes.items() if note.startswith("dropout is off")) == 3 * size


def test_the_norm_that_fsdp1_clips_by_is_raised(tmp_path: Path) -> None:
    """torch asks for it in float32, and of float64 refuses to. The sides 3, 4 and 5 here are no numbers of float32."""
    path = tmp_path / "train.py"
    path.write_text(BEGIN + CLIPPED, encoding="utf-8")
    printed, notes = ran(path, Arithmetic("float64"), 2)
    assert printed == (f"{(5 * (1 + 2**-24)).hex()}\n",) * 2
    assert not [note for note in notes if note.startswith("low precision")]


@pytest.mark.parametrize("precision", ["own", pytest.param("float64", marks=NIGHT)])
@pytest.mark.parametrize("script", ["DDP", pytest.param("tensor parallel", marks=NIGHT)], indirect=True)
def test_replicas_have_the_same_noise(script: Path, precision: str) -> None:
    noisy, other, plain = (ran(script, Arithmetic(precision, seed), 2)[0] for seed in (1, 2, None))  # type: ignore[arg-type]
    assert noisy[0] == noisy[1]
    assert noisy[0] != plain[0]
    assert noisy[0] != other[0]


@pytest.mark.parametrize("script", ["DDP"], indirect=True)
def test_calls_under_way_are_watched_as_without_noise(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    begin = "sent = torch.ones(3)\nwork = dist.all_reduce(sent, async_op=True)\n"
    end = "work.wait()\nassert sent.tolist() == [size] * 3\n"
    text = text.replace("optimizer = ", f"{begin}optimizer = ", 1).replace("values = ", f"{end}values = ")
    script.write_text(text, encoding="utf-8")
    for arithmetic in (Arithmetic("own", 1), Arithmetic("float64", 1)):
        ran(script, arithmetic, 2)
