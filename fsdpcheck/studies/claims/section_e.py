"""Section E: the two forms of a Linear's per-sample norm. A [B, T, d] activations, G [B, T, p] backprops."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fsdpcheck.case import KernelCase
from fsdpcheck.case.kernel import KernelSpec
from fsdpcheck.checks.kernels import assert_definition
from fsdpcheck.findings.violation import Violation
from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.registry import NEEDS_GPU, Outcome, claim, only_if, verdict


@claim(
    "E1",
    "A Linear's per-sample norm has two exact forms, Gram (T^2 (d + p)) and direct (T d p); Gram is cheaper for"
    " T < d p / (d + p).",
)
def two_exact_forms(lab: Lab) -> Outcome:
    """All against the definition on integers; operations on both sides of the crossovers, and the rule's choice.

    Triton's kernels are interpreted, in a process of its own, where Triton is installed.
    """
    wrong, shapes = 0, [(1, 4, 4), (3, 5, 2), (7, 3, 6), (12, 8, 8)]
    for T, d, p in shapes:
        a, g = toys.integers(3, T, d, seed=T), toys.integers(3, T, p, seed=T + 50)
        wanted = torch.einsum("btp,btd->bpd", g, a).square().sum((1, 2))
        forms = [impl("norms.linear").gram, impl("norms.linear").direct]
        forms += [impl("kernels.torch_norms").half_gram_squared_norm, impl("kernels.torch_norms").direct_squared_norm]
        wrong += sum(not torch.equal(form(a, g), wanted) for form in forms)
    interpreted, triton = _interpreted(lab)
    d, p = 48, 24
    crossover = Fraction(d * p, d + p)
    counted = {T: _operations(T, d, p) for T in (1, 4, 8, 15, 16, 17, 32, 64)}
    formula = all(found == (2 * T * T * (d + p), 2 * T * d * p) for T, found in counted.items())
    sides = all((gram < direct) == (crossover > T) for T, (gram, direct) in counted.items())
    tiles, side = {T: _operations(T, _WIDE, _WIDE, "kernels.torch_norms", *_HALF) for T in _LONG}, _side()
    halves = all(half == T * (T + side) * 2 * _WIDE for T, (half, _) in tiles.items())
    halves = halves and all((half < direct) == (T + side < _WIDE) for T, (half, direct) in tiles.items())
    last, most = _last_gram(d, p), crossover / 2
    chosen = last <= most < last + 1
    return Outcome(
        verdict(wrong == interpreted == 0 and formula and sides and halves and chosen),
        f"{len(shapes)} shapes, 4 implementations: {wrong} differ from the definition in a bit; {triton}; operations"
        f" counted at d = {d}, p = {p}:"
        f" {', '.join(f'T={T} {gram} to {direct}' for T, (gram, direct) in counted.items())}, equal at T ="
        f" {float(crossover):g}; half-Gram in tiles at d = p = {_WIDE}, over direct:"
        f" {', '.join(f'T={T} {half / direct:.2f}' for T, (half, direct) in tiles.items())}, equal at T = 2 d p /"
        f" (d + p) less the tiles' side: {_WIDE - side}; for accuracy the reference takes half-Gram up to T ="
        f" {last}, the last up to d p / (2 (d + p)) = {float(most):g}",
    )


_WIDE, _LONG = 1024, (256, 512, 768, 1024, 2048)
"""d = p, of which 2 d p / (d + p) is the same; T that the side of the tiles divides."""
_HALF = "half_gram_squared_norm", "direct_squared_norm"
_SHAPES = tuple(KernelSpec(2, T, d, p, bound=2) for T, d, p in ((1, 4, 4), (17, 33, 5), (33, 17, 20)))


def _side() -> int:
    """Positions in a tile of the half-Gram form."""
    return isqrt(impl("kernels.torch_norms").TILE // 2)


def _interpreted(lab: Lab) -> tuple[int, str]:
    """(how many kernel cases of Triton's kernels differ from the definition, in words)."""
    if importlib.util.find_spec("triton") is None:
        return 0, "Triton is not installed: its kernels are not among them"
    run, wrong = lab.run("reference"), 0
    for spec in _SHAPES:
        try:
            assert_definition(run(KernelCase(spec, seed=spec.positions)))
        except Violation:
            wrong += 1
    return wrong, f"Triton's kernels, interpreted: {wrong} of {len(_SHAPES)} shapes differ"


def _operations(
    T: int, d: int, p: int, module: str = "norms.linear", gram: str = "gram", direct: str = "direct"
) -> tuple[int, int]:
    """(operations of the Gram form, of the direct form) for one sample."""
    a, g = torch.empty(1, T, d, device="meta"), torch.empty(1, T, p, device="meta")
    counts = []
    for name in (gram, direct):
        with FlopCounterMode(display=False) as flops:
            getattr(impl(module), name)(a, g)
        counts.append(int(flops.get_total_flops()))
    return counts[0], counts[1]


def _last_gram(d: int, p: int) -> int:
    rule = impl("kernels.choice").rule
    return max(T for T in range(1, d + p) if rule(T, d, p) == "half_gram")


@claim("E2", "Triton is slower than cuBLAS for these norms.")
def triton_against_cublas(lab: Lab) -> Outcome:
    """Without a GPU: the operations and bytes that a time has to be held against. On one: the ratio of times.

    Half-Gram up to T = 1024, where it needs fewer operations, and direct beyond, against cuBLAS's batched product and a
    norm of what it wrote; the best of several rounds of each, which alternate. Run on an H200, once (docs/gpu.json).
    """
    B, d, size = 8, _WIDTH, 2
    if torch.cuda.is_available():
        return _timed(B, d)
    floors = []
    for T in (1024, 2048, 4096):
        direct, half = 2 * B * T * d * d, B * T * T * 2 * d
        floors.append(
            f"T={T}: direct {direct / 1e12:.2f}, half-Gram {half / 1e12:.2f} TFLOP, {size * B * T * 2 * d / 1e6:.0f} MB"
        )
    return Outcome(
        NEEDS_GPU,
        f"`python -m benchmarks kernels` on one; B = {B}, d = p = {d}, bfloat16: {'; '.join(floors)}; cuBLAS writes and"
        f" reads per-sample gradients of {4 * B * d * d / 1e6:.0f} MB beside that, a fused kernel none",
    )


_DEVICE, _WIDTH = "cuda", 4096


def _timed(samples: int, width: int) -> Outcome:
    """Times on this GPU in bfloat16: Triton's over cuBLAS's; only if they agree on the norms are they compared."""
    ratios, held = {}, {}
    for T in (512, 1024, 2048, 4096):
        a, g = (toys.integers(samples, T, width, seed=seed, bound=1).to(_DEVICE, torch.bfloat16) for seed in (T, T + 1))
        name = "half_gram_squared_norm" if T <= 1024 else "direct_squared_norm"
        ours, peer = partial(getattr(impl("kernels"), name), a, g), partial(_cublas, a, g)
        if not torch.allclose(ours().sqrt(), peer(), rtol=2**-7):  # the peer's gradients have 8 bits
            raise RuntimeError(f"{name} and cuBLAS have other norms at T = {T}: times of them say nothing")
        times = [(_milliseconds(ours), _milliseconds(peer)) for _ in range(5)]
        ratios[T] = min(mine for mine, _ in times) / min(theirs for _, theirs in times)
        held[T] = _peak(ours) / _peak(peer)
    shown = ", ".join(f"T={T} {ratio:.2f}" for T, ratio in ratios.items())
    memory = ", ".join(f"T={T} {part:.3f}" for T, part in held.items())
    slower = {T: ratio > 1 for T, ratio in ratios.items()}
    return Outcome(
        only_if(
            f"T is one of {', '.join(str(T) for T, is_slower in slower.items() if is_slower)}",
            under_it=any(slower.values()),
            otherwise=all(slower.values()),
        ),
        f"{torch.cuda.get_device_name()}, B = {samples}, d = p = {width}, bfloat16: Triton's time over cuBLAS's"
        f" {shown}; memory at most beside the inputs, likewise: {memory}",
    )


def _cublas(a: Tensor, g: Tensor) -> Tensor:
    """[B] norms of the gradients that one batched product writes."""
    found: Tensor = torch.linalg.vector_norm(torch.bmm(g.transpose(1, 2), a), dim=(1, 2), dtype=torch.float32)
    return found


def _milliseconds(run: Callable[[], Tensor]) -> float:
    """Of one call, after one that warms up."""
    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    run()
    start.record()
    run()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def _peak(run: Callable[[], Tensor]) -> int:
    """Bytes allocated at most above what was held before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before


@claim("E3", "Both forms are equally accurate.")
def forms_differ_in_accuracy(lab: Lab) -> Outcome:
    """Relative errors of norm^2 in float32 on tokens that cancel more and more; in bfloat16, samples left unclipped."""
    rows = []
    for part in (1.0, 1e-1, 1e-2, 1e-3):
        a, g = _cancelling(part)
        true_B = impl("norms.linear").direct(a.double(), g.double())
        kappa = (((a.double().square().sum(2) * g.double().square().sum(2)).sum(1)) / true_B).sqrt().median().item()
        gram, direct = (_error(form, a, g, true_B) for form in (impl("norms.linear").gram, impl("norms.linear").direct))
        rows.append((kappa, gram, direct))
    a, g = (half.bfloat16() for half in _cancelling(1e-3))
    true_B = impl("norms.linear").direct(a.double(), g.double())
    clip_norm = true_B.sqrt().min().item() / 2
    found_B = impl("norms.linear").gram(a, g).float()
    factors_B = impl("clipping.clip_factors").factors(found_B, clip_norm)
    unclipped = int((factors_B == 1).sum())
    shown = "; ".join(f"kappa {kappa:.0f}: Gram {gram:.0e}, direct {direct:.0e}" for kappa, gram, direct in rows)
    growth = [gram / direct for _, gram, direct in rows]
    return Outcome(
        verdict(max(growth) <= 10 and unclipped == 0),
        f"worst relative error of norm^2 in float32, {shown}: Gram over direct grows from {growth[0]:.0f} to"
        f" {growth[-1]:.0f}; in bfloat16 {int((found_B == 0).sum())} of {len(found_B)} Gram norms come out as 0 and"
        f" {unclipped} of {len(found_B)} samples of twice the clip norm and more keep factor 1",
    )


def _error(form: object, a: Tensor, g: Tensor, true_B: Tensor) -> float:
    found_B: Tensor = form(a, g)  # type: ignore[operator]
    return (found_B.double() / true_B - 1).abs().max().item()


def _cancelling(part: float) -> tuple[Tensor, Tensor]:
    """Tokens whose second half repeats the first with opposite backprops, changed by a ``part`` of their size."""
    generator = torch.Generator().manual_seed(0)
    a, g, change = (torch.randn(8, 32, 64, generator=generator) for _ in range(3))
    return torch.cat([a, a], 1), torch.cat([g, part * change - g], 1)
