"""Ranks on a machine that has a GPU: one that none of them uses is left alone, one that some use is kept apart."""

import threading

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fsdpcheck.simulation.globals import RankGlobals
from fsdpcheck.simulation.simulate import simulate


class PlayedGpu:
    """``torch.cuda`` of a machine with GPUs, as far as its state goes; to ask for any of it starts CUDA."""

    def __init__(self) -> None:
        self.runs = False
        self.now = {"device": 0, "stream": "default", "rng": "seed 0"}

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "is_available", lambda: True)
        monkeypatch.setattr(cuda, "is_initialized", lambda: self.runs)
        monkeypatch.setattr(cuda, "default_stream", lambda: "default")
        monkeypatch.setattr("fsdpcheck.simulation.globals._seeded_on_gpu", lambda: "seed 0")
        for name, key in (("current_device", "device"), ("current_stream", "stream"), ("get_rng_state", "rng")):
            monkeypatch.setattr(cuda, name, lambda key=key: self.read(key))
        for name, key in (("set_device", "device"), ("set_stream", "stream"), ("set_rng_state", "rng")):
            monkeypatch.setattr(cuda, name, lambda value, key=key: self.write(key, value))

    def read(self, key: str) -> object:
        self.runs = True
        return self.now[key]

    def write(self, key: str, value: object) -> None:
        self.runs = True
        self.now[key] = value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    played = PlayedGpu()
    played.install(monkeypatch)
    return played


def test_ranks_that_use_no_gpu_do_not_start_cuda(gpu: PlayedGpu) -> None:
    ranks = RankGlobals(2)
    for rank in (0, 1, 0, 1):
        ranks.enter(rank)
        ranks.leave(rank)
    ranks.restore()
    assert not gpu.runs


def test_what_a_rank_sets_on_its_gpu_is_its_own(gpu: PlayedGpu) -> None:
    ranks = RankGlobals(2)
    ranks.enter(0)
    for key, value in {"device": 3, "stream": "side", "rng": "seed 7"}.items():
        gpu.write(key, value)
    ranks.leave(0)
    ranks.enter(1)
    assert gpu.now == {"device": 0, "stream": "default", "rng": "seed 0"}
    gpu.write("device", 1)
    ranks.leave(1)
    ranks.enter(0)
    assert gpu.now == {"device": 3, "stream": "side", "rng": "seed 7"}
    ranks.leave(0)
    ranks.restore()
    assert gpu.now == {"device": 0, "stream": "default", "rng": "seed 0"}


def test_ranks_leave_no_device_guard_behind_where_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 keeps a pointer to the guard of the thread that entered the last fake mode, and reads it again."""
    threads: list[str] = []
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: threads.append(threading.current_thread().name))

    def entered() -> None:
        with FakeTensorMode():
            torch.empty(2)

    for built, others in (("13.0", []), (None, ["rank 0", "rank 1"])):
        monkeypatch.setattr(torch.version, "cuda", built)
        assert simulate(entered, 2).failure is None
        assert sorted(threads) == others, built
        threads.clear()
