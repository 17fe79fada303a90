"""What a rank leaves changed of its process: each entry of the table is noticed, named, put back, and met by nobody."""

from __future__ import annotations

import ctypes
import enum
import gc
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis.internal.conjecture.engine import ConjectureRunner
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck import process_state
from fsdpcheck.engines._simulated.in_process import InProcessEngine
from fsdpcheck.execution import RankResult
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging import registry
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.run import Run
from fsdpcheck.loading import import_patches
from fsdpcheck.process_state import Setting, settings
from fsdpcheck.process_state.names import Name, Names
from tests.simulation.simulator import Simulator

NOT_CHANGED_HERE = {
    "torch._C._get_blas_preferred_backend()": "needs CUDA",
    "torch._C._get_rocm_fa_preferred_backend()": "needs ROCm",
    "torch._C._get_tracing_state()": "an object of the tracer's",
    "torch._C._get_linalg_preferred_backend()": "needs CUDA",
    "torch._C._get_qengine()": "there is one for this processor",
    "torch._C._get_cpu_allow_fp16_reduced_precision_reduction()": "needs another processor",
    "signal handlers": "only the main thread may, which is no simulated rank's; see engines/test_processes.py",
}
"""Entries of the table that cannot be given another value on this machine, and why."""


def _never(*_: object) -> None: ...


def _others(value: Any) -> Iterator[Any]:
    """Values that a setting of this one may have instead."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, enum.Enum) or hasattr(type(value), "__members__"):
        yield from (member for member in type(value).__members__.values() if member != value)
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2, value / 2)
    elif isinstance(value, str):
        yield from ("high", "error", "raise", "nothing", "native", "C", "POSIX", str(Path(__file__).parent))
    elif isinstance(value, torch.dtype):
        yield torch.float64
    elif isinstance(value, tuple):
        for place, entry in enumerate(value):
            yield from ((*value[:place], other, *value[place + 1 :]) for other in _others(entry))
    elif isinstance(value, dict):
        yield from ({**value, b"FSDPCHECK_TEST": b"1"}, {**value, 7: _never})
        yield from ({**value, key: other} for key, entry in value.items() for other in _others(entry))
    elif isinstance(value, list):
        yield from ([*value, _never], value[::-1], [*value, *value])
    elif isinstance(value, set):
        yield {*value, "something"}
    elif value is None:
        yield from (_never, torch.device("meta"), 1, 1.0)


def _change(one: Setting) -> bool:
    """Give a setting another value; False when none is taken."""
    before = one.read()
    for other in _others(before):
        try:
            one.write(other)  # type: ignore[misc]
        except Exception:
            one.write(before)  # type: ignore[misc]
            continue
        if one.read() != before:
            return True
    return False


def _open_dispatch_mode() -> None:
    TorchDispatchMode().__enter__()


def _open_function_mode() -> None:
    torch.overrides.TorchFunctionMode().__enter__()


_held: list[object] = []


def _entered(context: Any) -> Any:
    context.__enter__()
    return context


OPENED: dict[str, Callable[[], object]] = {
    "torch.is_inference_mode_enabled()": lambda: _held.append(_entered(torch.inference_mode())),
    "dispatch modes": _open_dispatch_mode,
    "torch function modes": _open_function_mode,
    "functorch transforms": lambda: torch._C._functorch._grad_increment_nesting(),
    "hooks on saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(_never, _never).__enter__(),
}
"""What has no setter and is opened."""


@pytest.fixture(scope="module")
def simulate() -> Iterator[Simulator]:
    simulator = Simulator()
    yield simulator
    simulator.engine.close()


def _settings_on_ranks(simulate: Simulator) -> list[list[Any]]:
    found: dict[int, list[Any]] = {}

    def body(rank: int, size: int, result: RankResult) -> None:
        found[rank] = [repr(one.read()) for one in process_state.state().on_ranks if one.name != "os.environ"]

    assert simulate(body).left == ()
    return [found[rank] for rank in sorted(found)]


def test_each_setting_that_a_rank_changes_is_named_put_back_and_met_by_nobody(simulate: Simulator) -> None:
    _settings_on_ranks(simulate)
    before, judge = _settings_on_ranks(simulate), process_state.state().mark()
    with process_state.undisturbed():
        unchanged, missed = _each_changed(simulate)
    assert process_state.state().changes(judge) == []
    assert [name for name, _ in missed] == []
    assert set(unchanged) <= set(NOT_CHANGED_HERE), unchanged
    assert len(process_state.state().settings) - len(unchanged) >= 100
    assert _settings_on_ranks(simulate) == before


def test_settings_of_a_gpu_are_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_get_size", lambda: asked.append("read"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_set_size", lambda value: asked.append("written"), raising=False)
    assert not [one.name for one in settings._pairs(torch._C) if one.name.startswith("torch._C._cuda_")]
    assert not asked


def _each_changed(simulate: Simulator) -> tuple[list[str], list[tuple[str, object]]]:
    """Change each setting on rank 1, several in a run: those that take no other, and those not named."""
    unchanged, missed, table = [], [], process_state.state().settings
    for first in range(_RUNS):
        those, changed = table[first::_RUNS], []
        before = [one.read() for one in those]

        def body(rank: int, size: int, result: RankResult, those: Any = those, changed: Any = changed) -> None:
            dist.barrier()
            if rank == 1:
                changed += [bool(OPENED[one.name]()) or True if one.write is None else _change(one) for one in those]

        execution = simulate(body)
        assert execution.failure is None, (those, execution.failure)
        unchanged += [one.name for one, was in zip(those, changed, strict=True) if not was]
        named = {one.name for one in those for sentence in execution.left if one.name in sentence}
        missed += [(one.name, execution.left) for one in those if one.name not in {*named, *unchanged}]
        assert [one.read() for one in those] == before, those
    return unchanged, missed


_RUNS = 16


def test_every_watched_name_that_is_replaced_is_told_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = "__compiled_fn_1"  # what torch.compile writes into modules
    monkeypatch.setattr(torch.nn.functional, compiled, print, raising=False)
    names = Names()
    names.save()
    wanted: dict[tuple[int, str], tuple[Any, str, Any]] = {}
    for home, values in names.spaces():
        module = home.__name__ if isinstance(home, ModuleType) else home.__module__
        if not module.startswith(("torch.nn", "torch.optim", "torch.linalg", "fsdpcheck.checks", "fsdpcheck.exact")):
            continue  # the rest is compared by the same lines, and some of it by itself
        for name, value in values.items():
            of_python = name.startswith("__") and (name.endswith("__") or isinstance(home, ModuleType))
            if callable(value) and not of_python:
                wanted[id(home), name] = home, name, value
    gc.disable()
    try:
        for home, name, value in wanted.values():
            Name(home, name, value, _never).put_in_place()
        monkeypatch.setattr(torch.nn.functional, compiled, repr)
        found = names.changes()
        assert process_state.put_back(found) == []
    finally:
        for home, name, value in wanted.values():
            Name(home, name, value, _never).put_back()
        gc.enable()
    assert {(id(change.home), change.name) for change in found} == set(wanted)
    assert names.changes() == []
    assert len(wanted) > 2000


def _shadowing() -> None:
    torch.Tensor.isnan = lambda self: torch.ones_like(self, dtype=torch.bool)  # type: ignore[method-assign,assignment]


def _deleting() -> None:
    del torch.nn.functional.linear


def _replacing() -> None:
    import fsdpcheck.checks._compare as comparing

    for name in [name for name in vars(comparing) if name.startswith("require_")]:
        setattr(comparing, name, _never)


def test_names_that_a_rank_replaces_hides_or_deletes_are_told_and_put_back(simulate: Simulator) -> None:
    told = {
        _shadowing: "torch.Tensor.isnan added",
        _deleting: "torch.nn.functional.linear deleted",
        _replacing: "fsdpcheck.checks._compare.require_",
    }
    for change, words in told.items():
        import fsdpcheck.checks._compare as comparing

        before = torch.Tensor.isnan, torch.nn.functional.linear, dict(vars(comparing))
        execution = simulate(lambda rank, size, result, change=change: change() if rank else None)  # type: ignore[misc]
        assert any(f"a rank left {words}" in sentence for sentence in execution.left), execution.left
        assert (torch.Tensor.isnan, torch.nn.functional.linear, dict(vars(comparing))) == before


def test_what_an_honest_step_does_is_nothing_left(simulate: Simulator) -> None:
    def body(rank: int, size: int, result: RankResult) -> None:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.RMSprop(model.parameters())  # the first of its class: torch wraps the class's step
        with torch.no_grad(), torch.autograd.set_detect_anomaly(True):
            dist.barrier()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.manual_seed(7)

    assert simulate(body).left == ()


@pytest.fixture
def unwrapped_adam() -> Iterator[tuple[type, type]]:
    """Adam, and AdamW that inherits from it, as before torch wrapped anything of theirs."""
    kinds = torch.optim.Adam, torch.optim.AdamW
    kept = [{name: vars(kind).get(name) for name in ("step", "_init_group")} for kind in kinds]
    for kind, names in zip(kinds, kept, strict=True):
        for name, function in names.items():
            if function is not None and kind is torch.optim.Adam:
                setattr(kind, name, inspect.unwrap(function))
            elif function is not None:
                delattr(kind, name)
    yield kinds
    for kind, names in zip(kinds, kept, strict=True):
        for name, function in names.items():
            if function is not None:
                setattr(kind, name, function)
            else:
                delattr(kind, name)


def test_the_signals_that_the_c_library_keeps_for_itself_are_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first thread of a process on it handles signal 33: no rank of a pytest session did that."""
    status = tmp_path / "status"
    monkeypatch.setattr(settings, "_STATUS", status)

    def read(ignored: int, handled: int) -> tuple[int, ...]:
        status.write_text(f"Name:\tx\nUmask:\t0022\nSigIgn:\t{ignored:016x}\nSigCgt:\t{handled:016x}\n")
        return settings._dispositions()

    before = read(1 << 12, 1 << 1)
    assert before == (0o22, 1 << 12, 1 << 1) == read(1 << 12, 1 << 1 | 1 << 31 | 1 << 32)
    assert before not in (read(1 << 12, 1 << 1 | 1 << 33), read(1 << 12 | 1 << 9, 1 << 1))


def test_what_torch_wraps_class_by_class_is_nothing_left(
    unwrapped_adam: tuple[type, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW has Adam's functions until torch wraps them: for its profiler at the first use, for torch.compile once."""
    watched, (adam, adamw) = Names(), unwrapped_adam
    watched.save()
    for kind in (adamw, adam):
        kind([torch.nn.Parameter(torch.ones(1))])
    for kind in (adam, adamw):
        setattr(kind, "_init_group", torch.compiler.disable(getattr(kind, "_init_group")))  # noqa: B009, B010
    assert vars(adamw)["step"] is not vars(adam)["step"]
    assert watched.changes() == []
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", inspect.unwrap(torch.nn.utils.clip_grad_norm_))
    monkeypatch.setattr(adam, "step", torch.optim.SGD.step)
    assert {change.path for change in watched.changes()} >= {
        "torch.nn.utils.clip_grad_norm_",
        "torch.optim.adam.Adam.step",
    }


def test_a_name_the_import_changed_is_on_ranks_alone(simulate: Simulator, tmp_path: Path) -> None:
    """And so is a setting that each thread has of its own."""
    clean = torch.nn.functional.linear

    def patched(*_: object) -> None: ...

    with import_patches.recorded(str(tmp_path / "patching.py:adapter")):
        torch.nn.functional.linear = patched  # type: ignore[assignment]
        torch.set_grad_enabled(False)
    assert torch.nn.functional.linear is clean
    assert torch.is_grad_enabled()
    own = import_patches.patches([str(tmp_path / "patching.py:other")])
    with process_state.Kept(own, 2) as kept, kept.on_rank(0):
        assert torch.nn.functional.linear is patched
        assert not torch.is_grad_enabled()
    assert kept.left == {}
    assert torch.nn.functional.linear is clean
    assert torch.is_grad_enabled()
    sentences = import_patches.told([str(tmp_path / "patching.py:adapter")])
    assert any("torch.nn.functional.linear replaced" in sentence for sentence in sentences)


def test_ranks_of_a_thread_that_was_spoilt_are_not_used_again() -> None:
    simulate = Simulator()
    modes: list[int] = []

    def spoils(rank: int, size: int, result: RankResult) -> None:
        if rank == 1:
            TorchDispatchMode().__enter__()

    def looks(rank: int, size: int, result: RankResult) -> None:
        modes.append(torch._C._len_torch_dispatch_stack())

    assert simulate(spoils).left == ("rank 1 left dispatch modes at 1 (was 0)",)
    simulate(looks)
    simulate.engine.close()
    assert isinstance(simulate.engine, InProcessEngine)
    assert modes == [0, 0]


def test_what_ranks_have_apart_on_real_ranks_they_have_apart_on_simulated_ones(simulate: Simulator) -> None:
    """Global hooks, DTensor's operator handlers, FSDP1's profiler, recorded warnings, the environment."""
    shown: dict[int, list[object]] = {}

    def body(rank: int, size: int, result: RankResult) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.tensor import Shard, distribute_tensor
        from torch.distributed.tensor.parallel import loss_parallel

        seen: list[int] = []
        handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(rank))
        os.environ["FSDPCHECK_TEST"] = str(rank)
        dist.barrier()
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
        dist.barrier()
        handle.remove()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dist.barrier()
            warnings.warn("x", stacklevel=1)
            dist.barrier()
        in_c = ctypes.CDLL(None).getenv
        in_c.restype = ctypes.c_char_p
        shown[rank] = [len(seen), os.environ.pop("FSDPCHECK_TEST"), len(caught), in_c(b"RANK")]
        logits = distribute_tensor(torch.arange(16.0).view(2, 8), init_device_mesh("cpu", (size,)), [Shard(1)])
        with loss_parallel():
            torch.nn.functional.cross_entropy(logits.requires_grad_(), torch.arange(2)).backward()
        model = FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        FullyShardedDataParallel.optim_state_dict(model, optimizer)

    execution = simulate(body)
    assert execution.failure is None, execution.failure
    assert execution.left == ()
    assert shown == {rank: [1, str(rank), 1, b"%d" % rank] for rank in range(2)}
    assert "FSDPCHECK_TEST" not in os.environ


def _verdict(ref: str, engine: Any) -> Verdict:
    return check_law(registry.chapters()["training.plain"], Run(engine, ref), world_sizes=(2,), shrink=False, most=5)


@pytest.mark.parametrize("name", ["anomalous", "without_bias", "upwards", "doubling"])
def test_a_wrong_implementation_that_changes_its_process_is_a_finding(name: str) -> None:
    """Attacks that held: the setting leaked into the certifier, and the judge computed with what was replaced."""
    engine = InProcessEngine()
    ref = f"{Path(__file__).parents[1] / 'toys' / f'changing_{name}.py'}:adapter"
    mutations = ConjectureRunner.generate_mutations_from
    before = torch.nn.functional.linear, inspect.unwrap(torch.optim.SGD.step)
    try:
        verdict = _verdict(ref, engine)
    finally:
        engine.close()
    assert (verdict.status, verdict.exit_code) == ("finding", 1), verdict.reason
    assert verdict.left
    assert not any("hypothesis" in what for what in verdict.left)  # what the harness changes for the time of drawing
    assert ConjectureRunner.generate_mutations_from is mutations
    assert Verdict.from_data(verdict.to_data()) == verdict
    assert (torch.nn.functional.linear, inspect.unwrap(torch.optim.SGD.step)) == before  # torch profiles it
    assert not torch.is_anomaly_enabled()
