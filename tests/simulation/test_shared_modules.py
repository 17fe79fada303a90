"""What ranks of a program share and real ranks do not: modules imported before, arguments, variables around it."""

from __future__ import annotations

import copy
import functools
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdpcheck import simulate
from fsdpcheck.simulation import shared_state
from fsdpcheck.simulation.programs import modules, shared_objects
from fsdpcheck.simulation.simulate import Simulation
from tests.common.tables import each

_SOURCE = """
import functools, itertools
from torch import nn
CACHE, TABLE, SEEN, STEPS, LIMIT = {}, [[]], set(), 0, 3
COUNT, MODEL, OTHER = itertools.count(), nn.Linear(1, 1), nn.Dropout()

class Registry:
    made = 0
    def __init__(self):
        self.entries = {}

REGISTRY = Registry()

@functools.lru_cache
def square(number):
    return number * number

def called():
    called.times = getattr(called, "times", 0) + 1

def kept(held=[]):
    held.append(1)

def step():
    global STEPS
    STEPS += 1
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A user's module, imported before ranks run."""
    (tmp_path / "users_module.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("users_module")
    for name in [name for name in sys.modules if name.startswith("users_")]:
        del sys.modules[name]


def _told(done: Simulation) -> list[str]:
    """What was written to, by name."""
    assert bool(done.shared) == any(why.startswith("ranks wrote to what they share") for why in done.voids)
    return [sentence.removeprefix("ranks share ").partition(", and ")[0] for sentence in done.check().shared]


@each(
    "write, name",
    [
        (lambda mine: mine.CACHE.setdefault("key", 1), "CACHE"),
        (lambda mine: mine.TABLE[0].append(1), "TABLE"),
        (lambda mine: mine.SEEN.add(os.environ["RANK"]), "SEEN"),
        (lambda mine: setattr(mine, "LIMIT", 4), "LIMIT"),
        (lambda mine: setattr(mine, "NEW", 4), "NEW"),
        (lambda mine: mine.step(), "STEPS"),
        (lambda mine: next(mine.COUNT), "COUNT"),
        (lambda mine: nn.init.ones_(mine.MODEL.weight), "MODEL"),
        (lambda mine: mine.OTHER.eval(), "OTHER"),
        (lambda mine: setattr(mine.Registry, "made", 1), "Registry"),
        (lambda mine: mine.REGISTRY.entries.update(a=1), "REGISTRY"),
        (lambda mine: mine.square(3), "square"),
        (lambda mine: mine.called(), "called"),
        (lambda mine: mine.kept(), "kept"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_written_to_in_a_module_that_was_imported_before_is_told_by_name(
    write: Callable[[Any], object], name: str, mine: ModuleType
) -> None:
    assert _told(simulate(lambda: mine.CACHE.get("key"), 2)) == []
    assert _told(simulate(write, 2, [mine])) == [f"users_module.{name}"]
    assert _told(simulate(write, 1, [mine])) == []  # one rank shares with nobody


def test_the_rank_and_its_line_are_told_of_each_segment_that_is_looked_at(mine: ModuleType) -> None:
    def writes() -> None:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            mine.SEEN.add(1)
        dist.barrier()
        mine.CACHE.clear()
        if dist.get_rank() == 1:
            mine.CACHE[1] = 1

    line = writes.__code__.co_firstlineno + 4
    told = simulate(writes, 3).check().shared
    assert told == (
        f"ranks share users_module.SEEN, and rank 0 wrote to it, seen at {__file__}:{line};"
        " as on real ranks this would be each rank's own",
        "ranks share users_module.CACHE, and rank 1 wrote to it; as on real ranks this would be each rank's own",
    )


def test_where_looks_are_dear_several_ranks_share_one(mine: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_objects, "_AT_FIRST", 0)
    done = simulate(lambda: mine.SEEN.add(os.environ["RANK"]), 2).check()
    assert "and a rank wrote to it; as" in done.shared[0]


def test_looks_take_a_small_part_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = list[float]()
    look = shared_state.SharedState._look

    def counted(state: shared_state.SharedState, watched: shared_state._Watched) -> None:
        costs.append(watched.costs)
        look(state, watched)

    monkeypatch.setattr(shared_state.SharedState, "_look", counted)
    done = simulate(_many_calls, 2)
    left_out, at_the_end = 2 * (shared_objects._AT_FIRST + done.hand_overs * shared_objects._EACH), 2 * max(costs)
    assert 4 < len(costs) < done.hand_overs
    assert sum(costs) < left_out + at_the_end


def _many_calls() -> None:
    dist.init_process_group("gloo")
    for _ in range(2000):
        dist.barrier()


def test_arguments_and_variables_around_the_program_are_shared_too() -> None:
    count, seen = 0, list[int]()
    model, optimizer = nn.Linear(1, 1), torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.5, 0.5)

    def program(given: nn.Module, *, by_name: dict[str, int]) -> None:
        nonlocal count
        count += 1
        seen.append(1)
        given(torch.ones(1)).sum().backward()
        by_name["a"] = 1
        optimizer.param_groups[0]["lr"] = 0.25

    around = f"(around {program.__qualname__})"
    told = _told(simulate(program, 2, [model], {"by_name": {}}))
    assert set(told) == {f"count {around}", f"seen {around}", "args[0]", "kwargs['by_name']", f"optimizer {around}"}
    wrapped = functools.partial(program, model, by_name={})
    assert set(_told(simulate(wrapped, 2))) >= {program.__qualname__}


def test_what_is_right_writes_to_nothing(mine: ModuleType) -> None:
    def reads(model: nn.Module) -> float:
        dist.init_process_group("gloo")
        total = torch.ones(1, requires_grad=True) * mine.LIMIT + len(mine.CACHE)
        dist.all_reduce(total.detach())
        with torch.no_grad():
            return float(copy.deepcopy(model)(total).sum())

    assert _told(simulate(reads, 2, [nn.Linear(1, 1)])) == []


def test_parts_of_a_package_that_was_imported_before_are_each_ranks_own(tmp_path: Path, mine: ModuleType) -> None:
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    (tmp_path / "users_package" / "part.py").write_text("SEEN = []\n")
    package = importlib.import_module("users_package")

    def program() -> list[int]:
        import users_package.part

        dist.init_process_group("gloo")
        users_package.part.SEEN.append(dist.get_rank())
        dist.barrier()
        return list(users_package.part.SEEN)

    done = simulate(program, 2)
    assert (done.returned, _told(done)) == (([0], [1]), [])
    assert not hasattr(package, "part")


def test_c_code_of_a_user_is_told_and_installed_code_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "is_a_users", lambda path: path == "/home/user/native.so")
    native = ModuleType("native")
    native.__file__ = "/home/user/native.so"
    native.__loader__ = importlib.machinery.ExtensionFileLoader("native", native.__file__)
    monkeypatch.setitem(sys.modules, "native", native)
    done = simulate(lambda: None, 2)
    assert done.shared == ("ranks share the C code of native: as on real ranks only if it has no state",)
    assert done.voids == ()
