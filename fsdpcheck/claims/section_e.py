"""Section E: the two forms of a Linear's per-sample norm. A [B, T, d] activations, G [B, T, p] backprops."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fsdpcheck.claims import toys
from fsdpcheck.claims.lab import Lab, impl
from fsdpcheck.claims.registry import NEEDS_GPU, Outcome, claim, verdict


@claim(
    "E1",
    "A Linear's per-sample norm has two exact forms, Gram (T^2 (d + p)) and direct (T d p); Gram is cheaper for"
    " T < d p / (d + p).",
)
def two_exact_forms(lab: Lab) -> Outcome:
    """Both against the definition on integers; their operations counted on both sides of the crossover."""
    wrong, shapes = 0, [(1, 4, 4), (3, 5, 2), (7, 3, 6), (12, 8, 8)]
    for T, d, p in shapes:
        a, g = toys.integers(3, T, d, seed=T), toys.integers(3, T, p, seed=T + 50)
        wanted = torch.einsum("btp,btd->bpd", g, a).square().sum((1, 2))
        forms = [impl("norms.linear").gram, impl("norms.linear").direct]
        forms += [impl("kernels.torch_norms").half_gram_squared_norm, impl("kernels.torch_norms").direct_squared_norm]
        wrong += sum(not torch.equal(form(a, g), wanted) for form in forms)
    d, p = 48, 24
    crossover = Fraction(d * p, d + p)
    counted = {T: _operations(T, d, p) for T in (1, 4, 8, 15, 16, 17, 32, 64)}
    formula = all(found == (2 * T * T * (d + p), 2 * T * d * p) for T, found in counted.items())
    sides = all((gram < direct) == (crossover > T) for T, (gram, direct) in counted.items())
    tiles = _operations(512, 64, 64, "kernels.torch_norms", "half_gram_squared_norm", "direct_squared_norm")
    return Outcome(
        verdict(wrong == 0 and formula and sides),
        f"{len(shapes)} shapes, 4 implementations: {wrong} differ from the definition in a bit; operations counted"
        " at d ="
        f" {d}, p = {p}: {', '.join(f'T={T} {gram} to {direct}' for T, (gram, direct) in counted.items())}, equal"
        " at T ="
        f" {float(crossover):g}; half-Gram in tiles at T = 512 needs {tiles[0] / (2 * 512**2 * 128):.2f} of the"
        " Gram's; for"
        f" accuracy the reference takes half-Gram only up to T = d p / (2 (d + p)): T = {_last_gram(d, p)}",
    )


def _operations(
    T: int, d: int, p: int, module: str = "norms.linear", gram: str = "gram", direct: str = "direct"
) -> tuple[int, int]:
    """(operations of the Gram form, of the direct form) for one sample."""
    a, g = torch.ones(1, T, d), torch.ones(1, T, p)
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
    """No time is measured here: the operations and bytes that a time on a GPU has to be held against."""
    B, d, p, size = 8, 4096, 4096, 2
    floors = []
    for T in (1024, 2048, 4096):
        direct, half = 2 * B * T * d * p, B * T * T * (d + p)
        floors.append(
            f"T={T}: direct {direct / 1e12:.2f}, half-Gram {half / 1e12:.2f} TFLOP,"
            f" {size * B * T * (d + p) / 1e6:.0f} MB"
        )
    gradient = 4 * B * d * p / 1e6
    return Outcome(
        NEEDS_GPU,
        f"`python -m benchmarks kernels` on one; B = {B}, d = p = {d}, bfloat16: {'; '.join(floors)}; cuBLAS writes and"
        f" reads per-sample gradients of {gradient:.0f} MB beside that, a fused kernel none",
    )


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
    factors_B = impl("clip").factors(found_B, clip_norm)
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
