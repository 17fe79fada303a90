"""Section A, what putting norms together costs: calls, bytes, digits, and what could run meanwhile."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.network import GPU_FLOPS, all_reduce_seconds
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict

UNCLIPPED = 2.0**60
NORMS = "(per-sample norms)"


@claim("A8", "Norms are computed locally without communication; one all-reduce is the only synchronisation point.")
def norms_cost_one_all_reduce(lab: Lab) -> Outcome:
    """The collectives of a private step with bookkeeping, beyond those of a plain one, by whose data travels."""
    plain = _calls(lab, replicated=True)
    partial, complete = (
        _calls(lab, replicated=True, privacy=toys.privacy(UNCLIPPED, "ghost_bk", contribution=kind))
        for kind in ("partial", "complete")
    )
    norms = {kind: calls[NORMS] for kind, calls in (("partial", partial), ("complete", complete))}
    others = [dict(calls - plain - Counter({NORMS: calls[NORMS]})) for calls in (partial, complete)]
    return Outcome(
        only_if(
            "contributions are partial; complete ones need no call at all",
            under_it=norms["partial"] == 1,
            otherwise=norms["complete"] == 1,
        ),
        f"W = 2, one micro-batch, {sum(plain.values())} collectives in a plain step: partial norms add"
        f" {norms['partial']} for norms, complete ones {norms['complete']}; beside them each private step adds"
        f" {others[0] or 'nothing'}, by which all ranks learn of samples without a finite norm",
    )


def _calls(lab: Lab, **options: Any) -> Counter[str]:
    def body(rank: int) -> None:
        trainer = toys.trainer(toys.flat(toys.network()), **options)
        trainer.step(toys.micro_batches([range(toys.SAMPLES)]))

    lab.ranks(body, 2)
    return Counter(call.subject for call in lab.trace())


@claim(
    "A9",
    "One all-reduce of B numbers is negligible (0.5-1 % of a step, parallel efficiency 85-95 %); one call a layer"
    " is not.",
)
def one_all_reduce_is_negligible(lab: Lab) -> Outcome:
    """Calls and bytes from a trace; their share of a step by the model of network.py, from W = 8 to 4096."""
    lab.ranks(lambda rank: _partial_step(), 2)
    sent = [call for call in lab.trace() if call.subject == NORMS]
    numel = sum(math.prod(shape) for call in sent for _, shape in call.inputs)
    samples, layers = 8, 7 * 20
    step = 6 * 1e9 * samples * 4096 / GPU_FLOPS
    worlds = (8, 64, 512, 4096)
    fused = [all_reduce_seconds(4 * samples, w) / step for w in worlds]
    apart = [layers * all_reduce_seconds(4 * samples, w) / step for w in worlds]
    negligible = len(sent) == 1 and numel == toys.SAMPLES and max(fused) <= 0.01
    return Outcome(
        only_if(
            "all layers' norms travel in one call (share of a step by model; the efficiency takes several GPUs to"
            " measure)",
            under_it=negligible,
            otherwise=max(apart) <= 0.01,
        ),
        f"traced: {len(sent)} call of {numel} numbers for {toys.SAMPLES} samples; model, 1B parameters, B = {samples},"
        f" T = 4096, a step of {step:.2f} s, W = 8 to 4096: one call {100 * fused[0]:.4f} to {100 * fused[-1]:.3f} %,"
        f" {layers} calls {100 * apart[0]:.2f} to {100 * apart[-1]:.2f} %",
    )


def _partial_step() -> None:
    model = toys.flat(toys.network())
    trainer = toys.trainer(model, replicated=True, privacy=toys.privacy(UNCLIPPED, contribution="partial"))
    trainer.step(toys.micro_batches([range(toys.SAMPLES)]))


@claim("A10", "Sending squared norms in fp16 is risky (overflow, lost digits), and would gain 5-10 %.")
def half_precision_norms(lab: Lab) -> Outcome:
    """The smallest norm that overflows, a sample that underflow leaves unclipped, and the bytes saved."""
    overflows = _smallest(lambda norm: bool(torch.tensor(norm**2).half().isinf()))
    vanishes = 1 / _smallest(lambda inverse: torch.tensor(inverse**-2.0).double().half().item() == 0)
    clip_norm = vanishes / 2

    def body(rank: int) -> Tensor:
        return _sent(torch.tensor([overflows**2, vanishes**2 / 2]).double(), torch.float16)

    sent_2 = lab.ranks(body, 2)[0]
    factors_2 = impl("clipping.clip_factors").factors(sent_2, clip_norm)
    norm = vanishes * 1.0  # two ranks hold half of the square each
    unclipped = factors_2[1].item() == 1.0 and norm > clip_norm
    saved = (all_reduce_seconds(4 * 8, 4096) - all_reduce_seconds(2 * 8, 4096)) / all_reduce_seconds(4 * 8, 4096)
    risky = bool(sent_2[0].isinf()) and unclipped
    return Outcome(
        only_if(
            f"it means the risk: the gain is {100 * saved:.3f} % of the call", under_it=risky, otherwise=saved >= 0.05
        ),
        f"a norm of {overflows:.2f} overflows (float16 ends at {torch.finfo(torch.float16).max:g}); on two ranks a"
        " norm of"
        f" {norm:.2e} arrives as {sent_2[1].item():g} and keeps factor {factors_2[1].item():g} at C = {clip_norm:.2e},"
        f" so it is not clipped; relative error otherwise up to {torch.finfo(torch.float16).eps / 2:.1e}",
    )


def _smallest(met: Any) -> float:
    """The smallest number above 1 that meets a monotone condition, to 50 halvings."""
    low, high = 1.0, 2.0**20
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _sent(squared: Tensor, dtype: torch.dtype) -> Tensor:
    summed: Tensor = impl("clipping.norm_aggregation").sum_over(squared.to(dtype), impl("sharding.collectives").axis())
    return summed.double()


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operator that runs, by name, with the addresses of what it reads; ``mark`` notes a moment between them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, frozenset[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = [value for arg in args for value in (arg if isinstance(arg, (list, tuple)) else [arg])]
        reads = frozenset(value.data_ptr() for value in values if isinstance(value, Tensor) and value.numel())
        self.seen.append((str(func), reads))
        return func(*args, **(kwargs or {}))

    def mark(self, name: str, *results: Tensor) -> None:
        self.seen.append((name, frozenset(result.data_ptr() for result in results)))


@claim("A11", "An asynchronous all-reduce of the norms gains nothing, because its result is needed at once.")
def nothing_runs_beside_the_norms(lab: Lab) -> Outcome:
    """By the schedule: operators between the terms' being ready and the first that reads their sum, all-reduce aside.

    With one micro-batch, and with two whose norms are put together later.
    """
    one, two = _beside(lab, 1), _beside(lab, 2)
    return Outcome(
        only_if(
            "the logical batch is one micro-batch; the next one's forward and backward need no norms of the last",
            under_it=one == 0,
            otherwise=two == 0,
        ),
        "matrix products between the moment norm terms are ready and the first operator that reads their sum:"
        f" {one} in a"
        f" step of one micro-batch, {two} in a step of two whose clipped gradients are formed at its end",
    )


def _beside(lab: Lab, micro_batches: int) -> int:
    """Matrix products that need no sum of norms, while one is under way or could be, on rank 0 of 2."""
    logs = {rank: _Operations() for rank in range(2)}
    privacy = toys.privacy(UNCLIPPED, "ghost_bk", contribution="partial", fuse_norms=micro_batches > 1)
    rows = [list(range(toys.SAMPLES))[k::micro_batches] for k in range(micro_batches)]

    def body(rank: int) -> None:
        ready = lambda moment: logs[rank].mark(moment) if moment == "after_first_backward" else None  # noqa: E731
        model = toys.flat(toys.network())
        trainer = toys.trainer(model, replicated=True, sync_every=False, privacy=privacy, notify=ready)
        with logs[rank]:
            trainer.step(toys.micro_batches(rows))

    with _sums_marked(logs):
        lab.ranks(body, 2)
    seen = logs[0].seen
    names = [name for name, _ in seen]
    ready, summed = names.index("after_first_backward"), names.index("summed")
    (result,) = seen[summed][1]
    used = next(place for place, (_, reads) in enumerate(seen) if place > summed and result in reads)
    return sum(name.startswith(("aten.mm", "aten.bmm", "aten.addmm")) for name in names[ready:used])


@contextmanager
def _sums_marked(logs: dict[int, _Operations]) -> Iterator[None]:
    """Every sum of norms over ranks is noted in its rank's log."""
    aggregate = impl("clipping.norm_aggregation")
    original = aggregate.sum_over

    def sum_over(partial: Tensor, axis: Any) -> Tensor:
        result: Tensor = original(partial, axis)
        logs[axis.rank].mark("summed", result)
        return result

    aggregate.sum_over = sum_over
    try:
        yield
    finally:
        aggregate.sum_over = original


@claim("A12", "Needing fewer all-reduces by accumulating several batches is impossible.")
def fewer_all_reduces(lab: Lab) -> Outcome:
    """Three micro-batches of one logical batch, norms apart and together; then norms kept over an update."""
    micro = 3
    (apart, calls), (together, fused) = (_accumulated(lab, micro, fuse=fuse) for fuse in (False, True))
    wrong = toys.different(apart, together)
    x, y = toys.data()
    module = toys.network()
    stale_B = toys.squared_norms(module, x, y)
    for parameter, gradient in zip(
        module.parameters(), torch.autograd.grad(toys.loss(module(x), y).sum(), list(module.parameters())), strict=True
    ):
        parameter.data -= gradient / 64
    stale = int((toys.squared_norms(module, x, y) != stale_B).sum())
    possible = fused < calls and wrong == 0
    return Outcome(
        verdict(not possible),
        f"{micro} micro-batches of one logical batch: {calls} all-reduces of norms, or {fused} when the clipped"
        " gradients"
        f" wait for it, and {wrong} parameter elements differ; across an update it stays wrong: {stale} of {len(x)}"
        " norms are others after it",
    )


def _accumulated(lab: Lab, micro: int, *, fuse: bool) -> tuple[dict[str, Tensor], int]:
    privacy = toys.privacy(UNCLIPPED, "ghost_bk", contribution="partial", fuse_norms=fuse)

    def body(rank: int) -> dict[str, Tensor]:
        trainer = toys.trainer(toys.flat(toys.network()), replicated=True, sync_every=False, privacy=privacy)
        trainer.step(toys.micro_batches([list(range(toys.SAMPLES))[k::micro] for k in range(micro)]))
        values: dict[str, Tensor] = trainer.model.full_values()
        return values

    values = lab.ranks(body, 2)[0]
    return values, sum(call.subject == NORMS for call in lab.trace())
