"""What every engine owes its caller: the same requests give the same Execution, whatever the ranks are."""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdpcheck.case import Arithmetic, BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.engines import open_engine
from fsdpcheck.engines._common import hosts
from fsdpcheck.engines._common.metal import KINDS, of
from fsdpcheck.engines.base import Engine
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.errors import AdapterError, UsageError
from fsdpcheck.execution import Execution, Failure, RankResult, RunRequest
from fsdpcheck.execution.recording import OFFERED
from tests.common.tables import each

ENGINES: dict[str, Callable[[], Engine]] = {
    kind: functools.partial(open_engine, kind, 100) for kind in KINDS if kind != "nccl"
}
"""With a budget, so that an analysis that misses a hang is a red test and not a hanging one.

The programs make tensors on the processors, which NCCL does not take: of that see test_metal.py, and
benchmarks/gpu_ranks.py."""


def opened_here(kind: str) -> Engine:
    """An engine of this kind; the test is skipped where the machine has no such ranks."""
    if lacks := of(kind).lacks(4):
        pytest.skip(lacks)
    return ENGINES[kind]()


ADAPTERS = f"{Path(__file__).with_name('adapters_for_tests.py')}"
HERE = "installs_for_tests"
"""Found beside the adapter's file, by every rank of every engine."""


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = opened_here(request.param)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def simulated() -> Iterator[Engine]:
    opened = SimulatedEngine()
    yield opened
    opened.close()


def case(world_size: int = 2, **changes: Any) -> TrainingCase:
    model = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=3, units=(1,))
    plain = TrainingCase(model, MeshSpec(world_size), BatchLayout("contiguous", 2 * world_size), StepSpec(steps=2))
    return replace(plain, **changes)


def own(attribute: str, world_size: int = 2, **changes: Any) -> RunRequest:
    observe = frozenset({"params", "grads"})
    return replace(RunRequest(case(world_size), f"{ADAPTERS}:{attribute}", observe), **changes)


def failed(execution: Execution) -> Failure:
    assert execution.failure is not None, "the run completed"
    return execution.failure


def plain(value: Any) -> Any:
    """``value`` with tensors as bytes, so that equality is equality of bits."""
    match value:
        case torch.Tensor():
            return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
        case dict():
            return {key: plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [plain(entry) for entry in value]
        case _:
            return value


def content(result: RankResult) -> list[Any]:
    steps = [[record.params, record.grads, record.norms, record.factors, record.grad_norm] for record in result.steps]
    return [result.rank, plain(result.initial), plain(steps), plain(result.observations), result.trace]


def contents(execution: Execution) -> list[list[Any]]:
    assert execution.failure is None, execution.failure.text
    return [content(result) for result in execution.ranks]


@pytest.mark.parametrize("adapter", ["fully_shard", "fsdp1", f"{ADAPTERS}:honest"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_same_request_gives_the_same_bits_and_calls(
    engine: Engine, simulated: Engine, adapter: str, world_size: int
) -> None:
    request = RunRequest(case(world_size), adapter, frozenset({"params", "grads"}))
    execution = engine.run(request)
    assert contents(execution) == contents(simulated.run(request))
    assert [len(result.steps) for result in execution.ranks] == [2] * world_size
    assert execution.engine == engine.name
    assert execution.request is request


def test_a_run_repeats(engine: Engine) -> None:
    assert contents(engine.run(own("honest"))) == contents(engine.run(own("honest")))


def test_an_execution_is_plain_data(engine: Engine) -> None:
    execution = engine.run(own("honest", probes=(f"{HERE}:watch",), installs=(f"{HERE}:counting",)))
    assert contents(pickle.loads(pickle.dumps(execution))) == contents(execution)


Failing = Callable[[str], tuple[Failure, list[list[Any]]]]


@pytest.fixture(scope="module")
def failing(engine: Engine) -> Failing:
    """How the run of an attribute failed, and what the run after it held; each is run once."""

    @functools.cache
    def run(attribute: str) -> tuple[Failure, list[list[Any]]]:
        return failed(engine.run(own(attribute))), contents(engine.run(own("honest")))

    return run


def _is_called(kind: str, attribute: str, simulated: Engine, failing: Failing) -> None:
    """And leaks nothing into the next run."""
    failure, after = failing(attribute)
    assert after == contents(simulated.run(own("honest")))
    assert failure.kind == kind, failure.text
    assert failure.text.startswith(
        {"raised": "rank 1 raised ValueError", "exited": "rank 1 left with exit code 3"}.get(kind, kind)
    )
    assert [state.rank for state in failure.ranks] == [0, 1]


@each(
    ("attribute", "kind"),
    [("raises", "raised"), ("leaves", "exited"), ("late_alone", "deadlock"), ("other_shape", "mismatch")],
)
def test_what_goes_wrong_is_called_the_same(simulated: Engine, failing: Failing, attribute: str, kind: str) -> None:
    _is_called(kind, attribute, simulated, failing)


@pytest.mark.nightly
@each(
    ("attribute", "kind"),
    [
        ("crossed", "deadlock"),
        ("one_sided", "mismatch"),
        ("other_dtype", "mismatch"),
        ("other_op", "mismatch"),
        ("other_reduce_op", "mismatch"),
        ("other_root", "mismatch"),
        ("waits_for_a_message", "deadlock"),
        ("receives_another_dtype", "mismatch"),
    ],
)
def test_more_that_goes_wrong_is_called_the_same(
    simulated: Engine, failing: Failing, attribute: str, kind: str
) -> None:
    _is_called(kind, attribute, simulated, failing)


def test_an_exception_is_reported_with_its_traceback(failing: Failing) -> None:
    failure, _ = failing("raises")
    assert failure.exception == "ValueError"
    assert "ValueError: a bad shard" in failure.text
    assert "rank 0: in all_reduce" in failure.text
    assert [state.state for state in failure.ranks] == ["blocked", "raised"]


def test_a_deadlock_says_who_waits_where_for_whom(failing: Failing) -> None:
    failure, _ = failing("late_alone")
    assert "rank 0: in barrier() #0 on ranks [0, 1]" in failure.text
    assert "waiting for rank 1" in failure.text
    assert "was never called by rank 1" in failure.text
    waiting = failure.ranks[0]
    assert waiting.waiting_for.startswith("barrier()")
    assert Path(waiting.where.rpartition(":")[0]).name == "adapters_for_tests.py"
    assert any("late_alone" in line for line in waiting.stack)


def test_a_lock_of_a_module_is_one_lock_a_rank(engine: Engine) -> None:
    """Real ranks never wait for one another at it, so simulated ones do not either."""
    for attribute in ("locks", "caches"):
        assert engine.run(own(attribute, 3)).failure is None


def test_calls_in_flight_on_two_groups_may_cross(engine: Engine) -> None:
    assert engine.run(own("crossed_in_flight")).failure is None


@pytest.mark.parametrize("attribute", ["objects", "checkpoints"])
def test_objects_and_distributed_checkpoints_travel_unmodified(
    engine: Engine, simulated: Engine, attribute: str
) -> None:
    execution = engine.run(own(attribute, 3))
    assert contents(execution) == contents(simulated.run(own(attribute, 3)))
    assert len(execution.ranks[0].trace) > len(engine.run(own("honest", 3)).ranks[0].trace)


def test_ranks_start_each_run_with_the_globals_of_a_new_process(engine: Engine) -> None:
    assert engine.run(own("leaves_marks")).failure is None
    execution = engine.run(own("tells_marks"))
    assert execution.failure is None, execution.failure.text


def test_installs_are_in_place_for_one_run_and_their_hits_are_summed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{HERE}:counting"
    hosts.declared(f"{ADAPTERS}:honest")
    hosts.close()  # a new process, of an adapter that has declared itself, finds what stands beside its file
    hosts._required.clear()
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(Path(ADAPTERS).parent)])
    execution = engine.run(own("honest", installs=(name,)))
    calls = sum(len(result.trace) for result in execution.ranks)
    assert calls > 0
    assert execution.install_hits == {name: calls}
    assert engine.run(own("honest")).install_hits == {}


def test_probes_are_called_on_every_rank(engine: Engine) -> None:
    name = f"{HERE}:watch"
    execution = engine.run(own("honest", probes=(name,)))
    parameters = len(execution.ranks[0].initial)
    for rank, result in enumerate(execution.ranks):
        moments = [("after_init", -1), ("after_step", 0), ("after_step", 1)]
        assert result.observations == [(name, moment, step, (rank, parameters)) for moment, step in moments]


@pytest.mark.parametrize("adapter", ["no_such_adapter", f"{ADAPTERS}:not_an_adapter", "no/such/file.py:adapter"])
def test_a_request_for_no_adapter_is_refused(engine: Engine, adapter: str) -> None:
    with pytest.raises(AdapterError):
        engine.run(RunRequest(case(), adapter))


def test_a_request_for_no_install_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no install"):
        engine.run(own("honest", installs=("fsdpcheck.execution.trace:no_such_thing",)))


@pytest.mark.parametrize("attribute", ["sends", "receives_in_a_batch"])
def test_messages_are_the_same_on_every_engine(engine: Engine, simulated: Engine, attribute: str) -> None:
    assert contents(engine.run(own(attribute))) == contents(simulated.run(own(attribute)))


def test_a_message_may_come_from_anybody_on_every_engine(engine: Engine) -> None:
    assert len(contents(engine.run(own("receives_from_anybody")))) == 2


def test_what_is_not_offered_is_refused_in_words_that_are_true_on_every_engine(engine: Engine) -> None:
    failure = failed(engine.run(own("splits")))
    assert (failure.kind, failure.exception) == ("adapter", "fsdpcheck.errors.NotSupported")
    assert "is not offered in a checked program yet, on simulated ranks as on real ones" in failure.text
    assert f"on group '0' of ranks [0, 1]\n  wanted  one of {', '.join(OFFERED)}\n" in failure.text


@pytest.mark.parametrize("attribute", ["runs_out_of_memory", "wants_an_exabyte_of_python"])
def test_memory_that_ran_out_is_no_finding(engine: Engine, attribute: str) -> None:
    failure = failed(engine.run(own(attribute)))
    assert (failure.kind, failure.exception) == ("adapter", "fsdpcheck.errors.AdapterError")
    assert failure.text.startswith("rank 1 ran out of memory\n")
    assert "adapters_for_tests.py:" in failure.text
    assert engine.run(own("honest")).failure is None  # and the session goes on


def test_who_speaks_of_memory_alone_is_a_finding(engine: Engine) -> None:
    assert failed(engine.run(own("speaks_of_memory"))).kind == "raised"


def test_an_adapter_that_breaks_the_protocol_is_no_finding(engine: Engine) -> None:
    failure = failed(engine.run(own("honest", observe=frozenset({"params", "norms"}))))
    assert failure.kind == "adapter"
    assert "lacks a method" in failure.text


def test_copies_to_be_projected_are_no_finding(engine: Engine) -> None:
    failure = failed(engine.run(own("copying")))
    assert failure.kind == "adapter"
    assert "local_tensors() of adapter '_Copying' returned copies" in failure.text


def test_what_is_shown_does_not_change_afterwards(engine: Engine) -> None:
    assert contents(engine.run(own("live"))) == contents(engine.run(own("honest")))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_closes_twice_and_before_any_run(name: str) -> None:
    opened = opened_here(name)
    opened.close()
    opened.close()


def test_memory_without_values_holds_poison_or_zeros_at_all_lines_or_one(engine: Engine) -> None:
    programs = Path(__file__).with_name("programs_for_tests.py")
    asked = RunRequest(case(1, arithmetic=Arithmetic(project=False)), f"{programs}:memory_without_values")

    def results(memory: str) -> RankResult:
        done = engine.run(replace(asked, memory=memory))
        assert done.failure is None, done.failure
        return done.ranks[0]

    assert results("poison").allocations == []
    *_, site = [line for line in results("noted").allocations if line.startswith(f"{programs}:")]
    memories = ("poison", "noted", "zeros", f"zeros at {site}", "zeros at other.py:1")
    shown = [str(results(memory).steps[0].params["result"].tolist()) for memory in memories]
    assert shown == ["[nan, nan]", "[nan, nan]", "[0.0, 0.0]", "[0.0, 0.0]", "[nan, nan]"]
