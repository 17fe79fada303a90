"""Streams of played GPUs: what nothing orders is told with both lines, and what is in order is let be."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpcheck import Simulation
from fsdpcheck.simulation.simulate import simulate


def played(program: Callable[[], object]) -> Simulation:
    def whole() -> object:
        dist.init_process_group("nccl")
        return program()

    return simulate(whole, 2, show=False, cuda_as_cpu=True)


def line(program: Callable[[], object], mark: str) -> str:
    lines, first = inspect.getsourcelines(program)
    return f"{__file__}:{first + next(number for number, text in enumerate(lines) if text.endswith(mark))}"


def on_main() -> Tensor:
    """A tensor with values that come of the default stream."""
    return torch.ones(4, device="cuda").mul_(2)


def current() -> Any:
    return torch.cuda.current_stream()


# -- pairs: a race, and its twin ----------------------------------------------------------------


def side_reads_at_once() -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    x.mul_(2)  # there
    with torch.cuda.stream(side):
        x * 2  # here


def side_waits_and_reads() -> float:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        y = x * 2
    current().wait_stream(side)
    return y.sum().item()


def side_writes_what_main_reads() -> None:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    x * 2  # there
    with torch.cuda.stream(side):
        x.zero_()  # here


def side_writes_when_main_has_read() -> float:
    x, side = on_main(), torch.cuda.Stream()
    y = x * 2
    side.wait_stream(current())
    with torch.cuda.stream(side):
        x.zero_()
    return y.sum().item()


def event_too_early() -> None:
    x, side, event = on_main(), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    x.add_(1)  # there
    side.wait_event(event)
    with torch.cuda.stream(side):
        x * 2  # here


def event_in_time() -> float:
    x, side, event = on_main(), torch.cuda.Stream(), torch.cuda.Event()
    x.add_(1)
    event.record()
    event.wait(side)
    with side:
        y = x * 2
        done = side.record_event()
    current().wait_event(done)
    return y.sum().item()


def event_never_recorded() -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()  # there
    side.wait_event(torch.cuda.Event())
    with torch.cuda.stream(side):
        x * 2  # here


def event_recorded() -> None:
    x, side, event = torch.ones(4, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    event.record(current())
    side.wait_event(event)
    with torch.cuda.stream(side):
        x * 2


def reduced_on_a_side_stream() -> None:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        dist.all_reduce(x)  # there
    x + 1  # here


def reduced_on_a_side_stream_and_waited_for() -> float:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    current().wait_stream(side)
    return x.sum().item()


def other_stream_waits_for_the_work() -> None:
    x, side = on_main(), torch.cuda.Stream()
    work: Any = dist.all_reduce(x, async_op=True)  # there
    with torch.cuda.stream(side):
        work.wait()
    x + 1  # here


def stream_that_uses_it_waits_for_the_work() -> None:
    x, side = on_main(), torch.cuda.Stream()
    work: Any = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
        x + 1


def call_on_what_a_side_stream_writes() -> None:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        x.add_(1)  # there
    dist.all_reduce(x)  # here


def call_on_what_a_side_stream_wrote() -> None:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        x.add_(1)
        dist.all_reduce(x)


def copy_read_too_early() -> float:
    copied = on_main().to("cpu", non_blocking=True)  # there
    return copied.sum().item()  # here


def copy_read_after_a_wait() -> float:
    copied = on_main().to("cpu", non_blocking=True)
    current().synchronize()
    return copied.sum().item()


def copy_listed_too_early() -> list[float]:
    there = torch.empty(4, pin_memory=True)
    there.copy_(on_main(), non_blocking=True)  # there
    return there.tolist()  # here


def copy_that_blocks_is_listed() -> list[float]:
    there = torch.empty(4, pin_memory=True)
    there.copy_(on_main())
    return there.tolist()


def source_overwritten_too_early() -> None:
    source = torch.ones(4).pin_memory()
    source.cuda(non_blocking=True)  # there
    source.zero_()  # here


def source_overwritten_after_a_wait() -> None:
    source, event = torch.ones(4).pin_memory(), torch.cuda.Event()
    source.cuda(non_blocking=True)
    event.record()
    event.synchronize()
    source.zero_()


def wrong_stream_is_synchronized() -> float:
    side = torch.cuda.Stream()
    copied = on_main().to("cpu", non_blocking=True)  # there
    side.synchronize()
    return copied.sum().item()  # here


def device_is_synchronized() -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        copied = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    return copied.sum().item()


def halves_that_overlap() -> None:
    x, side = on_main(), torch.cuda.Stream()
    side.wait_stream(current())
    x[:3].add_(1)  # there
    with torch.cuda.stream(side):
        x[2:].add_(1)  # here


def halves_that_do_not() -> None:
    x, side = torch.ones(4, 4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(current())
    x[:2].add_(1)
    x[2:, :2].add_(1)
    with torch.cuda.stream(side):
        x[2:, 2:].add_(1)


def made_elsewhere_by_default() -> None:
    side = torch.cuda.Stream()
    with torch.device("cuda"), torch.cuda.stream(side):
        x = torch.ones(4)  # there
    x + 1  # here


def made_elsewhere_without_values() -> None:
    x, side = on_main(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y = torch.empty_like(x).fill_(1)
    current().wait_stream(side)
    x + y


PAIRS = [
    (side_reads_at_once, side_waits_and_reads),
    (side_writes_what_main_reads, side_writes_when_main_has_read),
    (event_too_early, event_in_time),
    (event_never_recorded, event_recorded),
    (reduced_on_a_side_stream, reduced_on_a_side_stream_and_waited_for),
    (other_stream_waits_for_the_work, stream_that_uses_it_waits_for_the_work),
    (call_on_what_a_side_stream_writes, call_on_what_a_side_stream_wrote),
    (copy_read_too_early, copy_read_after_a_wait),
    (copy_listed_too_early, copy_that_blocks_is_listed),
    (source_overwritten_too_early, source_overwritten_after_a_wait),
    (wrong_stream_is_synchronized, device_is_synchronized),
    (halves_that_overlap, halves_that_do_not),
    (made_elsewhere_by_default, made_elsewhere_without_values),
]


@pytest.mark.parametrize(("race", "twin"), PAIRS)
def test_a_race_is_told_with_both_lines_and_its_twin_is_silent(
    race: Callable[[], object], twin: Callable[[], object]
) -> None:
    failure = played(race).failure
    assert failure is not None
    assert failure.kind == "stream race"
    assert [state.where for state in failure.ranks] == [line(race, "# here\n"), line(race, "# there\n")]
    assert played(twin).failure is None


# -- memory that is freed in use ----------------------------------------------------------------


def used_on_a_side_stream(
    before: Callable[[Tensor, Any], object] = lambda x, side: None, after: Callable[[Any], object] = lambda side: None
) -> None:
    x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        x * 2  # use
    before(x, side)
    del x  # freed
    after(side)
    torch.zeros(4, device="cuda")  # again


def test_memory_that_is_given_away_in_use_is_told_with_its_lines() -> None:
    failure = played(used_on_a_side_stream).failure
    assert failure is not None
    assert failure.kind == "freed in use"
    assert [state.where for state in failure.ranks] == [
        line(used_on_a_side_stream, mark) for mark in ("# again\n", "# use\n")
    ]
    assert f"freed at {line(used_on_a_side_stream, '# freed' + chr(10))}" in failure.text
    assert "record_stream" in failure.text


def resized(x: Tensor, side: Any) -> None:
    x.untyped_storage().resize_(0)


def test_memory_freed_by_resizing_its_storage_is_freed() -> None:
    failure = played(lambda: used_on_a_side_stream(resized)).failure
    assert failure is not None
    assert failure.kind == "freed in use"
    assert f"freed at {line(resized, 'resize_(0)' + chr(10))}" in failure.text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "program",
    [
        lambda: used_on_a_side_stream(lambda x, side: x.record_stream(side)),
        lambda: used_on_a_side_stream(lambda x, side: current().wait_stream(side)),
        lambda: used_on_a_side_stream(after=lambda side: current().wait_stream(side)),
        lambda: used_on_a_side_stream(after=lambda side: side.synchronize()),
    ],
    ids=["record_stream", "waits before", "waits before the next allocation", "host waits"],
)
def test_memory_is_not_given_away_in_use(program: Callable[[], object]) -> None:
    assert played(program).failure is None


def test_an_input_of_an_asynchronous_call_is_kept_until_the_wait() -> None:
    def program() -> None:
        pieces = [torch.empty(4, device="cuda"), torch.empty(4, device="cuda")]
        work: Any = dist.all_gather(pieces, on_main(), async_op=True)
        torch.zeros(4, device="cuda")
        work.wait()
        del work
        torch.zeros(4, device="cuda")

    assert played(program).failure is None


# -- what programs do ----------------------------------------------------------------


def prefetches() -> None:
    """Batches of the host are copied ahead, on a stream that waits for nobody."""
    side, weight = torch.cuda.Stream(), torch.ones(4, 4, device="cuda")
    ahead = None
    for _ in range(3):
        batch = torch.ones(4, 4).pin_memory()
        if ahead is not None:
            current().wait_stream(side)
            ahead.record_stream(current())
            weight.add_(ahead @ weight)
        with torch.cuda.stream(side):
            ahead = batch.cuda(non_blocking=True)


def goes_back_through_two_streams() -> float:
    side = torch.cuda.Stream()
    first, second = nn.Linear(4, 4).cuda(), nn.Linear(4, 4).cuda()
    for _ in range(2):
        hidden = first(torch.ones(4, device="cuda"))
        side.wait_stream(current())
        with torch.cuda.stream(side):
            loss = second(hidden).sum()
        loss.backward()
        with torch.no_grad():
            for weight in (*first.parameters(), *second.parameters()):
                weight.sub_(weight.grad)  # type: ignore[arg-type]
        side.wait_stream(current())
    return loss.item()


def uses_gradients_where_they_were_computed() -> float:
    """The engine computes them on the stream of the forward."""
    layer, side = nn.Linear(4, 4).cuda(), torch.cuda.Stream()
    side.wait_stream(current())
    with torch.cuda.stream(side):
        loss = layer(torch.ones(4, device="cuda")).sum()
    loss.backward()
    with torch.cuda.stream(side):
        return layer.weight.grad.sum().item()  # type: ignore[union-attr]


def goes_by_another_rank() -> None:
    """The second call ends after the other rank has begun it, and that is after the first."""
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()
    side.wait_stream(current())
    if dist.get_rank() == 0:
        with torch.cuda.stream(side):
            x.add_(1)
            dist.all_reduce(torch.ones(1, device="cuda"))
    else:
        dist.all_reduce(torch.ones(1, device="cuda"))
    dist.all_reduce(torch.ones(1, device="cuda"))
    x.add_(1)


def asks_until_it_is_done() -> list[float]:
    copied = on_main().to("cpu", non_blocking=True)
    event = current().record_event()
    while not event.query():
        pass
    return copied.tolist()


@pytest.mark.parametrize(
    "program",
    [
        prefetches,
        goes_back_through_two_streams,
        uses_gradients_where_they_were_computed,
        goes_by_another_rank,
        asks_until_it_is_done,
    ],
)
def test_programs_in_order_are_let_be(program: Callable[[], object]) -> None:
    assert played(program).failure is None
