"""Section C: norms computed after the backward instead of in it."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fsdpcheck.case import BatchLayout, LayerSpec, MeshSpec, ModelSpec, StepSpec, TrainingCase
from fsdpcheck.execution import SchedulePolicy
from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.network import GPU_FLOPS, LAUNCH_SECONDS
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict

UNCLIPPED = 2.0**60
MODES = ("ghost", "ghost_bk", "flash", "flash_bk")
TIMINGS = ("immediate", "deferred")
_SCHEDULES: tuple[SchedulePolicy, ...] = ("forward", "reversed")
_UNEVEN = [[0, 1, 2], [], [3]]
"""Samples of each of three ranks."""


@claim(
    "C1",
    "Touching parameters inside the backward hook can trigger an all-gather on some ranks and deadlock; caching, and"
    " computing after the backward, is safe.",
)
def hooks_that_touch_parameters(lab: Lab) -> Outcome:
    """Planted: norms that gather again, in the hook and after the backward, on ranks that have rows; then without.

    Without, in every mode, sharded either way; all in the order of ranks and in the opposite one, which stand for every
    order where ranks are deterministic and joined by blocking collectives alone.
    """
    planted = _endings(lab, "immediate", "norm_hook_gathers")
    after = _endings(lab, "deferred", "deferred_norms_gather")
    runs = list(product(toys.WAYS, MODES))
    honest = {t: {end for way, mode in runs for end in _endings(lab, t, way=way, mode=mode)} for t in TIMINGS}
    safe = honest["deferred"] == {"completes"}
    return Outcome(
        only_if(
            "what runs after the backward touches no parameters on some ranks alone either",
            under_it="completes" not in planted and safe,
            otherwise=after == {"completes"},
        ),
        f"W = 3, one rank without samples, ranks in either order: a hook that touches parameters: {_told(planted)};"
        f" norms deferred, {len(MODES)} modes, {len(toys.WAYS)} ways of sharding: {_told(honest['deferred'])}; norms in"
        f" the hook that touch none, the same: {_told(honest['immediate'])}; deferred norms that touch parameters:"
        f" {_told(after)}",
    )


def _told(endings: set[str]) -> str:
    return " or ".join(sorted(endings))


def _endings(lab: Lab, timing: str, *faults: str, way: str = "flat", mode: str = "ghost") -> set[str]:
    """How a clipped step on an uneven batch ends, in either order of ranks: "completes", or the failure's kind."""

    def body(rank: int) -> None:
        trainer = toys.trainer(toys.WAYS[way](toys.network()), privacy=toys.privacy(UNCLIPPED, mode, timing))
        trainer.step(toys.micro_batches([_UNEVEN[rank]]))

    with ExitStack() as stack:
        for name in faults:
            stack.enter_context(impl("faults").install(name))
        failures = [lab.attempt(body, len(_UNEVEN), schedule).failure for schedule in _SCHEDULES]
    return {"completes" if failure is None else failure.kind for failure in failures}


@claim("C2", "Deferred norms equal immediate ones (elsewhere a difference below 1e-4 is accepted).")
def deferred_equals_immediate(lab: Lab) -> Outcome:
    """Norms, factors and parameters of two clipped steps, in every mode, both ways of sharding, W = 1 to 3."""
    compared, apart, largest = 0, 0, 0.0
    for way, mode, world_size in product(toys.WAYS, MODES, (1, 2, 3)):
        one, other = (_clipped(lab, way, mode, timing, world_size) for timing in TIMINGS)
        for a, b in zip(one, other, strict=True):
            compared += a.numel()
            apart += int((a.view(torch.int64) != b.view(torch.int64)).sum())
            largest = max(largest, (a - b).abs().max().item() if a.numel() else 0.0)
    return Outcome(
        verdict(apart == 0),
        f"{apart} of {compared} numbers (norms, clip factors, parameters) differ in a bit, the largest difference is"
        f" {largest:g}: {len(MODES)} modes, {len(toys.WAYS)} ways of sharding, W = 1, 2, 3",
    )


def _clipped(lab: Lab, way: str, mode: str, timing: str, world_size: int) -> list[Tensor]:
    def body(rank: int) -> list[Tensor]:
        trainer = toys.trainer(toys.WAYS[way](toys.network()), privacy=toys.privacy(2.0, mode, timing))
        for _ in range(2):
            trainer.step(toys.micro_batches([toys.share(rank, world_size)]))
        found = trainer.found
        return [*found.norms, *found.factors, *trainer.model.full_values().values()]

    return [tensor for tensors in lab.ranks(body, world_size) for tensor in tensors]


@claim("C3", "Deferral is 1.5-2.0 times faster on more than 1B parameters and sequences longer than 4096.")
def deferral_is_faster(lab: Lab) -> Outcome:
    """Operations and operators of both timings; what grouping all norms' kernels into one launch could save at most."""
    one, other = (_counted(lab, timing) for timing in TIMINGS)
    operators, norm = one[1] / len(toys.network()), _operators_of_a_norm()
    sizes = {(d, T): _bound(operators, norm, d, T) for d in (64, 256, 1024, 2048, 4096) for T in (1, 64, 1024, 4096)}
    gains = [f"d={d}, T={T}" for (d, T), bound in sizes.items() if bound >= 1.5]
    claimed = [bound for (d, T), bound in sizes.items() if d >= 2048 and T >= 4096]
    return Outcome(
        verdict(max(claimed) * max(one[0] / other[0], one[2] / other[2]) >= 1.5),
        f"immediate and deferred steps run {one[0]} and {other[0]} operations of matrix products, {one[1]} and"
        f" {other[1]}"
        f" operators, {one[2]} and {other[2]} collectives, so deferral can only save launches, by grouping the"
        f" {norm} operators of each norm of {operators:.0f} a layer: by model at most {max(claimed):.3f} times at d"
        " = 2048"
        f" and more, T = 4096, and {max(sizes.values()):.2f} at any size; 1.5 times at {', '.join(gains) or 'none'}",
    )


def _bound(operators: float, norm: int, width: int, length: int, layers: int = 140) -> float:
    """Upper bound of immediate over deferred time, of arithmetic and launches the longer, B = 1.

    A layer has the products of forward, two backwards and norm, 2 T d^2 operations each, and so many operators; the
    norm's of all layers become those of one.
    """
    arithmetic = layers * 6 * 2 * length * width**2 / GPU_FLOPS
    launches = layers * operators * LAUNCH_SECONDS
    grouped = launches - (layers - 1) * norm * LAUNCH_SECONDS
    return max(arithmetic, launches) / max(arithmetic, grouped)


def _operators_of_a_norm() -> int:
    counting = _Counting()  # type: ignore[no-untyped-call]
    layer, tokens = nn.Linear(4, 4).double(), torch.ones(2, 3, 4).double()
    with counting, torch.no_grad():
        impl("norms.linear").squared_norm(layer, tokens, tokens)
    return counting.count


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """How many operators run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _counted(lab: Lab, timing: str) -> tuple[int, int, int]:
    """(operations of matrix products, operators, collectives) of one clipped step on rank 0 of 2."""

    def body(rank: int) -> tuple[int, int]:
        trainer = toys.trainer(toys.flat(toys.network()), privacy=toys.privacy(2.0, timing=timing))
        rows = toys.micro_batches([toys.share(rank, 2)])
        operators = _Counting()  # type: ignore[no-untyped-call]
        with FlopCounterMode(display=False) as flops, operators:
            trainer.step(rows)
        return flops.get_total_flops(), operators.count

    flops, count = lab.ranks(body, 2)[0]
    return flops, count, len(lab.trace())


@claim("C4", "Deferral costs less than 5 % extra memory.")
def deferral_costs_memory(lab: Lab) -> Outcome:
    """Peak live bytes of a step; and by formula what a backward that frees backprops would not hold."""
    peaks = {mode: [_peak(lab, mode, timing) for timing in TIMINGS] for mode in MODES[:2]}
    extra = {
        mode: round(100 * (deferred - immediate) / immediate, 2) + 0.0 for mode, (immediate, deferred) in peaks.items()
    }
    cached = [_formula(batch, checkpointing=False) for batch in (1, 2, 4)]
    recomputed = [_formula(batch, checkpointing=True) for batch in (1, 2, 4)]
    return Outcome(
        only_if(
            "the immediate mode keeps activations and backprops anyway, as bookkeeping does",
            under_it=max(extra.values()) < 5,
            otherwise=max(cached + recomputed) < 5,
        ),
        f"peak live bytes of the reference, deferred over immediate: two passes {extra['ghost']:.2f} %, bookkeeping"
        f" {extra['ghost_bk']:.2f} %; over a mode that frees each backprop, by formula, 1B parameters, T = 4096,"
        " one rank,"
        f" B = 1, 2, 4: {_percent(cached)}, with activation checkpointing {_percent(recomputed)}",
    )


def _percent(values: list[float]) -> str:
    return ", ".join(f"+{value:.0f} %" for value in values)


def _formula(batch: int, *, checkpointing: bool) -> float:
    """Extra per cent. 20 layers of width d = 2048, 12 d^2 parameters each, bfloat16 with Adam in float32.

    States 16 bytes a parameter. Activations 34 T d bytes a layer (Korthikanti et al. 2022, arXiv:2205.05198, less the
    attention matrix), 2 T d with checkpointing. Linear outputs, and so backprops, are 9 d numbers a token and layer (q,
    k, v, output, 4 up, down); with checkpointing their inputs, 7 d, have to be kept as well.
    """
    layers, d, T = 20, 2048, 4096
    states = 16 * layers * 12 * d**2
    activations = layers * (2 if checkpointing else 34) * T * d * batch
    kept = layers * (9 + 7 * checkpointing) * d * T * 2 * batch
    return 100 * kept / (states + activations)


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that storages made while it is on hold at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._alive = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._alive[storage._cdata] = (weak, storage.nbytes())
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def _peak(lab: Lab, mode: str, timing: str) -> int:
    """Peak bytes of one clipped step: 6 layers of width 32 on 4 sequences of 64."""

    def body(rank: int) -> int:
        module = nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)]).double()
        trainer = toys.trainer(toys.flat(module, units=[]), privacy=toys.privacy(1.0, mode, timing))
        x = toys.integers(4, 64, 32, seed=9)
        living = _Living()
        with living:
            trainer.step([impl("trainer").MicroBatch(x, torch.zeros_like(x), range(4))])
        return living.peak

    peak: int = lab.ranks(body, 1)[0]
    return peak


@claim(
    "C5", "Deferral works in every mode (ghost, flash, with and without bookkeeping, FSDP, one device); off by default."
)
def deferral_works_in_every_mode(lab: Lab) -> Outcome:
    """Norms against their definition in every mode; the mode is read back when used, and so are the passes that ran."""
    true_B = toys.squared_norms(toys.network(), *toys.data()).sqrt()
    arms, wrong, another = 0, [], []
    for way, mode, world_size in product(toys.WAYS, MODES, (1, 2)):
        norms_B, used, passes = _deferred_arm(lab, way, mode, world_size)
        arms += 1
        name = f"{mode}, {way}, W={world_size}"
        if not torch.equal(norms_B, true_B):
            wrong.append(name)
        if used != impl("clipping.modes").parse(mode, "deferred") or passes != (1 if mode.endswith("bk") else 2):
            another.append(name)
    off = impl("clipping.modes").DEFAULT.timing
    return Outcome(
        verdict(not wrong and not another and off == "immediate"),
        f"{arms} arms with deferred norms: {arms - len(wrong)} have every bit of the norms as defined,"
        f" {arms - len(another)}"
        f" ran the mode and the number of backwards that they name; the default is {off}",
    )


def _deferred_arm(lab: Lab, way: str, mode: str, world_size: int) -> tuple[Tensor, Any, int]:
    """(norms [B] in dataset order, the mode that was used, backwards that were taken) with deferred norms."""

    def body(rank: int) -> tuple[Tensor, Any, int]:
        trainer = toys.trainer(toys.WAYS[way](toys.network()), privacy=toys.privacy(UNCLIPPED, mode, "deferred"))
        trainer.profile = trainer.private.profile = profile = impl("costs.profile").Profile()
        trainer.step(toys.micro_batches([toys.share(rank, world_size)]))
        parts = {part for part, *_ in profile.table()}
        ordered = trainer.norms_in_dataset_order(toys.SAMPLES).values
        return ordered, trainer.private.mode, 1 + ("second backward" in parts)

    found: tuple[Tensor, Any, int] = lab.ranks(body, world_size)[0]
    return found


_MODEL = ModelSpec((LayerSpec(3, bias=True, activation="relu"), LayerSpec(2)), features=3, units=(1,))


@claim("C6", "Unequal, empty or missing batches on a rank do not hang it.")
def uneven_batches_do_not_hang(lab: Lab) -> Outcome:
    """Empty ranks, one rank with everything, Poisson draws; then a rank that leaves a micro-batch out."""
    shares = [(4, 0, 1), (0, 0, 5), (5, 0, 0), (0, 4, 1)]
    adapters = ("reference", "reference_fsdp2", "fully_shard", "fsdp1")
    ended = {name: sum(_completes(lab, name, counts) for counts in shares) for name in adapters}
    empty, poisson = _poisson(lab)
    missing = lab.attempt(_without_a_micro_batch, 2).failure
    return Outcome(
        only_if(
            "every rank takes the same number of micro-batches, empty ones where it has no samples",
            under_it=all(count == len(shares) for count in ended.values()) and poisson,
            otherwise=missing is None,
        ),
        f"steps that complete, of {len(shares)} with empty ranks, W = 3: {ended}; 6 steps of Poisson sampling, W = 4,"
        f" {empty} empty micro-batches: {'complete' if poisson else 'fail'}; a rank that leaves one of two"
        " micro-batches"
        f" out: {missing.kind if missing is not None else 'completes'}",
    )


def _completes(lab: Lab, adapter: str, counts: tuple[int, ...]) -> bool:
    clipping: Any = "unclipped" if adapter.startswith("reference") else "none"
    layout = BatchLayout("ragged", sum(counts), counts=counts)
    case = TrainingCase(
        _MODEL, MeshSpec(dp_shard=len(counts)), layout, StepSpec(steps=2, normaliser=4, clipping=clipping)
    )
    return lab.run(adapter)(case).failure is None


def _poisson(lab: Lab) -> tuple[int, bool]:
    """(empty micro-batches drawn, whether every step completes)."""

    def body(rank: int) -> int:
        axis = impl("sharding.collectives").axis()
        sampler = impl("sampling.poisson").PoissonSampler(toys.SAMPLES, 0.25, 2, impl("noise.gaussian").seeded(3), axis)
        trainer = toys.trainer(toys.flat(toys.network()), privacy=toys.privacy(1.0), normaliser=3)
        draws = [sampler.draw(step) for step in range(6)]
        for draw in draws:
            trainer.step(toys.micro_batches(draw))
        return sum(not rows for draw in draws for rows in draw)

    failure = lab.attempt(body, 4).failure
    return (0 if failure is not None else sum(lab.returned), failure is None)


def _without_a_micro_batch(rank: int) -> None:
    trainer = toys.trainer(toys.flat(toys.network()), privacy=toys.privacy(1.0))
    trainer.step(toys.micro_batches([[0], [1]] if rank == 0 else [[2]]))
