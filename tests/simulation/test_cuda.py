"""GPUs played on the CPU: what is substituted, counted and meant, and what is told without the option."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from fsdpcheck import simulate
from fsdpcheck.report import colour, simulation
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.search import Search
from fsdpcheck.simulation.simulate import Options, Simulation, simulate_script


def _play(program: Callable[[], Any], size: int = 2) -> Simulation:
    return simulate(program, size, cuda_as_cpu=True, show=False).check()


def _init() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def _played(line: str, size: int = 2) -> dict[str, int]:
    """What one rank's line substitutes, beside what makes its process group."""
    names = {"torch": torch, "dist": dist, "nn": nn, "io": io, "DataLoader": DataLoader, "TensorDataset": TensorDataset}
    names |= {"DDP": DistributedDataParallel, "FSDP": FullyShardedDataParallel}

    def program() -> None:
        names["rank"] = _init()
        exec(line, dict(names))

    done = _play(program, size)
    assert all(count % size == 0 for _, count in done.substitutions), done.substitutions
    return {name: count // size for name, count in done.substitutions}


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("assert torch.zeros(2).cuda().device.type == 'cpu'", {"Tensor.cuda": 1}),
        ("nn.Linear(1, 1).cuda(rank)", {"Tensor.cuda": 2}),
        ("torch.zeros(2).to('cuda:0'); torch.zeros(2).to(device=rank)", {"Tensor.to": 2}),
        ("nn.Linear(1, 1).to(rank); nn.Linear(1, 1).to(device='cuda')", {"Tensor.to": 4}),
        ("torch.ones(1, device='cuda') + torch.ones(1, device=rank)", {"torch.ones(device=)": 2}),
        ("nn.Linear(2, 1, device=torch.device('cuda', rank))", {"torch.empty(device=)": 2}),
        ("torch.zeros(1).new_ones(2, device='cuda')", {"Tensor.new_ones(device=)": 1}),
        ("torch.cuda.set_device(rank); assert torch.cuda.current_device() == rank",
         {"torch.cuda.set_device": 1, "torch.cuda.current_device": 1}),
        ("assert torch.cuda.is_available() and torch.cuda.device_count() == 2",
         {"torch.cuda.is_available": 1, "torch.cuda.device_count": 1}),
        ("torch.cuda.synchronize(); torch.cuda.empty_cache()",
         {"torch.cuda.synchronize": 1, "torch.cuda.empty_cache": 1}),
        ("assert torch.cuda.memory_allocated() == torch.cuda.max_memory_reserved() == 0",
         {"torch.cuda.memory_allocated": 1, "torch.cuda.max_memory_reserved": 1}),
        ("torch.cuda.set_rng_state(torch.cuda.get_rng_state())",
         {"torch.cuda.get_rng_state": 1, "torch.cuda.set_rng_state": 1}),
        ("with torch.cuda.device(1): assert torch.cuda.current_device() == 1",
         {"torch.cuda.device": 1, "torch.cuda.current_device": 1}),
        ("x = torch.ones(1, 1)\nwith torch.autocast('cuda', torch.bfloat16): assert (x @ x).dtype is torch.bfloat16",
         {"autocast": 1}),
        ("x = torch.ones(1, 1)\nwith torch.cuda.amp.autocast(): assert (x @ x).dtype is torch.float16",
         {"autocast": 1}),
        ("assert torch.cuda.amp.GradScaler().is_enabled()", {"GradScaler(device=)": 1}),
        ("assert torch.zeros(2).pin_memory().shape == (2,)", {"Tensor.pin_memory": 1}),
        ("assert torch.ones(2, pin_memory=True).sum() == 2", {"torch.ones(pin_memory=)": 1}),
        ("list(DataLoader(TensorDataset(torch.zeros(2)), pin_memory=True))", {"DataLoader(pin_memory=)": 1}),
        ("torch.set_default_device('cuda'); assert torch.ones(1).device.type == 'cpu'; torch.set_default_device(None)",
         {"torch.device as default": 1}),
        ("with torch.device('cuda'): torch.ones(1)", {"torch.device as default": 1}),
        ("assert str(torch.device(rank)) == f'cuda:{rank}'", {"torch.device(int)": 1}),
        ("torch.distributed.init_device_mesh('cuda', (2,))", {"DeviceMesh(device_type=)": 1}),
        ("b = io.BytesIO(); torch.save(torch.ones(1), b); b.seek(0); torch.load(b, map_location='cuda:0')",
         {"torch.load(map_location=)": 1}),
        ("DDP(nn.Linear(1, 1), device_ids=[rank])", {"DistributedDataParallel(device_ids=)": 1}),
        ("FSDP(nn.Linear(1, 1), device_id=rank)", {"FullyShardedDataParallel(device_id=)": 1}),
        ("dist.new_group(backend='nccl')", {'new_group("nccl")': 1}),
        ("torch.Generator(device='cuda').manual_seed(1)", {"torch.Generator": 1}),
        ("torch.zeros(1).record_stream(torch.cuda.Stream())", {"Tensor.record_stream": 1}),
        ("torch.zeros(1).type('torch.cuda.HalfTensor')", {"Tensor.type": 1}),
        ("assert torch.cuda.FloatTensor([1]).tolist() == [1]", {}),
        ("assert str(torch.accelerator.current_accelerator()) == 'cuda'", {"torch.accelerator.current_accelerator": 1}),
        ("torch.accelerator.set_device_index(rank); assert torch.accelerator.current_device_index() == rank",
         {"torch.accelerator.set_device_index": 1, "torch.accelerator.current_device_index": 1}),
        ("torch.cuda.nvtx.range_push('here'); torch.cuda.nvtx.range_pop()",
         {"torch.cuda.nvtx.range_push": 1, "torch.cuda.nvtx.range_pop": 1}),
        ("assert torch.cuda.nccl.version() == (0, 0, 0)", {"torch.cuda.nccl.version": 1}),
    ],
)  # fmt: skip
def test_each_substitution_is_counted_by_its_name(line: str, counts: dict[str, int]) -> None:
    assert _played(line) == counts


def test_nccl_and_the_device_of_a_group_are_played() -> None:
    def program() -> int:
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))
        tensor = torch.ones(1, device="cuda")
        dist.all_reduce(tensor)
        return int(tensor)

    done = _play(program, 3)
    assert done.returned == (3, 3, 3)
    assert dict(done.substitutions) == {
        'init_process_group("nccl")': 3,
        "init_process_group(device_id=)": 3,
        "torch.ones(device=)": 3,
    }


def test_streams_and_events_are_in_order_with_all_else() -> None:
    def program() -> tuple[bool, bool, bool, bool]:
        side, begin, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.Event("cuda")
        begin.record()
        with torch.cuda.stream(side):
            inside = torch.cuda.current_stream() is side
            side.wait_stream(torch.cuda.default_stream())
        side.record_event(end)
        torch.cuda.current_stream().wait_event(end)
        later: Any = torch.cuda.Event(enable_timing=True)
        return inside, torch.cuda.current_stream() is not side, begin.elapsed_time(later) > 0, end.query()

    assert _play(program).returned == ((True,) * 4,) * 2


def test_what_moves_to_a_gpu_and_back_is_a_copy() -> None:
    def program() -> list[float]:
        there = torch.zeros(1)
        moved, back = there.cuda(), there.to("cuda").cpu()
        moved += 1
        back += 2
        leaf = torch.ones(1, requires_grad=True)
        assert leaf.to("cuda") is leaf
        return [float(there), float(moved), float(back)]

    assert _play(program, 1).returned == ([0.0, 1.0, 2.0],)


def test_the_generator_of_a_gpu_is_its_own_and_each_ranks() -> None:
    def program() -> tuple[list[float], ...]:
        torch.manual_seed(1)
        host, first = torch.rand(2), torch.rand(2, device="cuda")
        torch.cuda.manual_seed(int(dist.get_rank()))
        after = torch.rand(2)
        torch.manual_seed(1)
        return (
            host.tolist() + after.tolist(),
            first.tolist(),
            torch.rand(4).tolist(),
            torch.rand(2, device="cuda").tolist(),
        )

    def on_rank() -> tuple[list[float], ...]:
        _init()
        return program()

    for host, first, both, again in _play(on_rank).returned:
        assert host == both  # seeds and draws of the GPU have not touched those of the CPU
        assert first == again
        assert first != host[:2] or first == both[:2]


def test_sync_batch_norm_is_batch_norm_of_all_samples() -> None:
    whole = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).double()

    def apart() -> tuple[torch.Tensor, ...]:
        rank = _init()
        layer = nn.SyncBatchNorm(3).double()
        mine = (whole[:2] if rank == 0 else whole[2:]).clone().requires_grad_()
        out = layer(mine)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        assert mine.grad is not None
        return out.detach(), mine.grad, layer.running_var

    (one, _, variance), (other, _, _) = (done := _play(apart)).returned
    alone = nn.BatchNorm1d(3).double()
    assert torch.allclose(torch.cat([one, other]), alone(whole), atol=1e-6)
    assert torch.allclose(variance, alone.running_var)
    assert dict(done.substitutions)["SyncBatchNorm"] == 2
    tensor = whole.clone().requires_grad_()
    weights = torch.cat([torch.arange(24.0).view(2, 3, 4), torch.arange(48.0).view(4, 3, 4)])
    (nn.BatchNorm1d(3).double()(tensor) * weights).sum().backward()
    assert tensor.grad is not None
    assert torch.allclose(torch.cat([grad for _, grad, _ in done.returned]), tensor.grad, atol=1e-4)


def test_torch_itself_is_told_the_truth() -> None:
    def program() -> bool:
        with torch.random.fork_rng():
            torch.manual_seed(3)
        layer = nn.Linear(2, 2)
        out = torch.utils.checkpoint.checkpoint(layer, torch.ones(1, 2, requires_grad=True), use_reentrant=False)
        out.sum().backward()
        return torch.cuda.is_available() and bool(torch.optim.AdamW(layer.parameters()).step() is None)

    assert _play(program).returned == (True, True)


def test_a_thread_of_a_rank_finds_the_same_gpu() -> None:
    def program() -> list[int]:
        torch.cuda.set_device(_init())
        found: list[int] = []
        thread = threading.Thread(
            target=lambda: found.append(torch.zeros(1).cuda().new_tensor(torch.cuda.current_device()))
        )
        thread.start()
        thread.join()
        return [int(each) for each in found]

    assert _play(program).returned == ([0], [1])


def test_devices_can_be_copied_saved_and_asked_for_their_class() -> None:
    def program() -> tuple[bool, ...]:
        device = torch.device("cuda", 1)
        kept = [copy.deepcopy(device), pickle.loads(pickle.dumps(device))]
        return isinstance(device, torch.device), kept == [device] * 2, isinstance(torch.Generator(), torch.Generator)

    assert _play(program, 1).returned == ((True, True, True),)


def test_every_name_of_torch_cuda_is_played_left_alone_or_refused_by_name() -> None:
    def program() -> dict[str, str]:
        said = {}
        for owner in (torch.cuda, torch.accelerator):
            for name in owner.__all__:
                thing = getattr(owner, name)
                if callable(thing) and not name.endswith(("Error", "Storage", "Tensor")):
                    try:
                        thing()
                    except Exception as error:
                        said[f"{owner.__name__}.{name}"] = str(error).splitlines()[0]
        return said

    (said,) = _play(program, 1).returned
    refused = {name for name, text in said.items() if text == f"{name} is not played on the CPU"}
    assert {"torch.cuda.CUDAGraph", "torch.cuda.make_graphed_callables"} <= refused
    assert ("torch.accelerator.Graph" in refused) == hasattr(torch.accelerator, "Graph")  # not in torch 2.11
    others = {name: text for name, text in said.items() if name not in refused}
    assert all("argument" in text or name == "torch.cuda.cudaStatus" for name, text in others.items()), others


@pytest.mark.parametrize(("dtype", "uses"), [(torch.float16, [False, True]), (torch.bfloat16, [True, True])])
def test_gradients_in_float16_are_computed_by_kernels_of_torch_itself(dtype: torch.dtype, uses: list[bool]) -> None:
    """oneDNN's of convolutions take 200 times as long as those in bfloat16."""

    def program() -> list[bool]:
        seen: list[bool] = []
        images = torch.ones(1, 1, 4, 4, requires_grad=True)
        images.register_hook(lambda gradient: seen.append(torch.backends.mkldnn.enabled))
        with torch.autocast("cuda", dtype):
            nn.functional.conv2d(images, torch.ones(1, 1, 3, 3)).sum().backward()
        return [*seen, torch.backends.mkldnn.enabled]

    assert _play(program).check().returned == (uses, uses)


def test_all_is_put_back() -> None:
    before = (torch.device, torch.cuda.is_available, torch.cuda.Stream, torch.load, torch.autocast.__init__)
    _play(lambda: torch.zeros(1).cuda())
    after = (torch.device, torch.cuda.is_available, torch.cuda.Stream, torch.load, torch.autocast.__init__)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert not torch.cuda.is_available() or torch.cuda.get_device_name() != "CPU, played as a GPU"
    assert not pickle.loads(pickle.dumps(torch.device("cuda"))).index


def _without(line: str, folder: Path) -> Simulation:
    (folder / "program.py").write_text(f"import torch, torch.distributed as dist\n{line}\n")
    return simulate_script(script.of_file(folder / "program.py", []), 2, Options(show=False))


def _in_every_cuda_build(line: str) -> Any:
    """A call for which torch built for CUDA needs no GPU."""
    has = pytest.mark.skipif(torch.version.cuda is not None, reason="torch built for CUDA does this without a GPU")
    return pytest.param(line, marks=has, id=line)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told where there is no GPU")
@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.set_device(0)",
        "torch.zeros(1).cuda()",
        "torch.zeros(1).to(0)",
        "torch.nn.Linear(1, 1).to('cuda')",
        "torch.zeros(1, device='cuda')",
        "torch.cuda.current_device()",
        "torch.cuda.synchronize()",
        "torch.cuda.Stream()",
        _in_every_cuda_build("torch.cuda.Event()"),
        "torch.zeros(1).pin_memory()",
        "torch.accelerator.set_device_index(0)",
        "torch.Generator(device='cuda')",
        _in_every_cuda_build("torch.cuda.nccl.version()"),
        _in_every_cuda_build("torch.cuda.nvtx.range_push('x')"),
        "torch.nn.parallel.DistributedDataParallel(dist.init_process_group('nccl') or torch.nn.Linear(1, 1), [0])",
        "assert torch.cuda.is_available(), 'this needs a GPU'",
    ],
)
def test_without_the_option_a_script_is_told_at_the_call(line: str, tmp_path: Path) -> None:
    failure = _without(line, tmp_path).failure
    assert failure is not None
    assert failure.kind == "adapter"
    said = failure.text
    assert said.startswith("the program wants a GPU, and there is none")
    assert f"got     {line}: " in said
    assert "program.py:2" in said
    assert "--cuda-as-cpu" in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is told where there is no GPU")
def test_a_script_that_leaves_because_there_is_no_gpu_is_no_riddle(tmp_path: Path) -> None:
    done = _without("if not torch.cuda.is_available():\n    raise SystemExit", tmp_path)
    assert done.failure is None
    assert done.asked_for_gpu.endswith("program.py:2")
    report = simulation.ending(Search(done, 1, False), colour.painter(io.StringIO()))
    assert "it asked for a GPU at" in report
    assert "add --cuda-as-cpu" in report


@pytest.mark.parametrize("line", ["torch.zeros(2) + torch.zeros(3)", "raise ValueError('no batch for gpu 0 on nccl')"])
def test_an_error_of_a_program_that_wants_no_gpu_stays_what_it_is(line: str, tmp_path: Path) -> None:
    failure = _without(line, tmp_path).failure
    assert failure is not None
    assert failure.kind == "raised"


def test_the_report_and_its_data_list_what_was_played() -> None:
    done = _play(lambda: torch.zeros(1).cuda())
    report = simulation.ending(Search(done, 1, False), colour.painter(io.StringIO()))
    assert "  played on the CPU: Tensor.cuda 2" in report
    assert simulation.document(Search(done, 1, False), ["x.py"])["substitutions"] == {"Tensor.cuda": 2}
