"""K1 to K3: the norm kernels of a Linear on a GPU, against cuBLAS's batched product with a norm, and against the GPU.

``python -m benchmarks kernels``: per sequence length and form, one line of time, paired with the peer, and the ratio to
the physical floor of this GPU: the operations of the form at the rate of a large square product measured in the same
run, or its bytes read once at the measured rate of a large copy, whichever takes longer; and the bytes that it
allocates over those of the gradients. Prints "needs a GPU" without.

Before any timing the arms have to give equal norms on integers, bit for bit, and to be different code: memory peaks
below the size of the gradients in the kernels, and above it in the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.paired import paired
from fsdpcheck.impl import kernels
from fsdpcheck.impl.kernels import choice

SAMPLES, WIDTH = 8, 4096
LENGTHS = (512, 1024, 2048, 4096)


def lines() -> Iterator[str]:
    """One line a measurement. Raises RuntimeError if an arm is wrong or is not what it says."""
    if not torch.cuda.is_available():
        yield "needs a GPU: none found, K1 to K3 are not measured"
        return
    flops, bandwidth = _flops_a_second(), _bytes_a_second()
    yield f"{torch.cuda.get_device_name()}: {flops / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s measured"
    for length in LENGTHS:
        a_BTd, g_BTp = _integers(length)
        _check_arms(a_BTd, g_BTp)
        operations = {
            "direct": 2 * SAMPLES * length * WIDTH**2,
            "half_gram": SAMPLES * length * (length + 1) * 2 * WIDTH,
        }
        forms = {"direct": kernels.direct_squared_norm, "half_gram": kernels.half_gram_squared_norm}
        read = a_BTd.element_size() * (a_BTd.numel() + g_BTp.numel())
        for name, form in forms.items():
            ratio = paired(
                f"K1 {name}, bf16, T={length}", _waiting(form, a_BTd, g_BTp), _waiting(_peer, a_BTd, g_BTp), ">= 1"
            )
            floor = max(operations[name] / flops, read / bandwidth)
            yield f"{ratio}\nK2 {name}: {ratio.ours_seconds / floor:.2f} times the floor of {floor * 1e3:.3f} ms"
            share = _peak(form, a_BTd, g_BTp) / _held(a_BTd)
            yield f"K3 {name}: allocates {share:.1e} of the bytes of the gradients   goal <= 1e-3"


def choices(device: str, lengths: tuple[int, ...] = LENGTHS, width: int = WIDTH) -> Iterator[str]:
    """Which form is the fastest here at each length, as ``choice.measure`` has it, beside what the rule says.

    Bmm is measured too: it holds the gradients, and is a choice only for whoever has the memory.
    """
    forms: dict[choice.Form, Callable[[Tensor, Tensor], Tensor]] = {
        "direct": kernels.direct_squared_norm,
        "half_gram": kernels.half_gram_squared_norm,
        "bmm": kernels.bmm_squared_norm,
    }
    for length in lengths:
        a_BTd, g_BTp = (torch.ones(SAMPLES, length, width, device=device, dtype=torch.bfloat16) for _ in range(2))
        for held, tried in ((False, {name: forms[name] for name in ("direct", "half_gram")}), (True, forms)):
            ((shape, fastest),) = choice.measure(a_BTd, g_BTp, tried).items()
            among = "with the gradients held" if held else "by kernels"
            rule = choice.rule(shape.T, shape.d, shape.p)
            yield f"T={shape.T} d={shape.d} p={shape.p} {shape.dtype}, {among}: {fastest}; the rule says {rule}"


def _peer(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B] norms, not squared: cuBLAS in the dtype of the data, then ``vector_norm`` in float32."""
    return torch.linalg.vector_norm(torch.bmm(g_BTp.transpose(1, 2), a_BTd), dim=(1, 2), dtype=torch.float32)


def _check_arms(a_BTd: Tensor, g_BTp: Tensor) -> None:
    """Equal on exact data, bit for bit; only the peer holds the gradients."""
    held = _held(a_BTd)
    wanted = kernels.bmm_squared_norm(a_BTd.double(), g_BTp.double()).float()
    for name, form in (("direct", kernels.direct_squared_norm), ("half-Gram", kernels.half_gram_squared_norm)):
        if not torch.equal(form(a_BTd, g_BTp), wanted):
            raise RuntimeError(
                f"{name} gives other norms than the definition on exact data: run tests/impl on this GPU"
            )
        if _peak(form, a_BTd, g_BTp) >= held:
            raise RuntimeError(f"{name} holds as much memory as the gradients: it is not the kernel")
    if not torch.equal(_peer(a_BTd, g_BTp), wanted.sqrt()):
        raise RuntimeError("the peer computes something else: its norms differ from the definition on exact data")
    if _peak(_peer, a_BTd, g_BTp) < held:
        raise RuntimeError("the peer does not hold the gradients: it is not the batched product")


def _held(a_BTd: Tensor) -> int:
    """Bytes of all samples' gradients in the dtype of the data."""
    return SAMPLES * WIDTH * WIDTH * a_BTd.element_size()


def _peak(run: Callable[[Tensor, Tensor], Tensor], a_BTd: Tensor, g_BTp: Tensor) -> int:
    """Bytes allocated at most above what was held before."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(a_BTd, g_BTp)
    return torch.cuda.max_memory_allocated() - before


def _integers(length: int) -> tuple[Tensor, Tensor]:
    """Sparse ones of either sign: products, sums over T and the norm^2 stay below 2^24, so float32 is exact."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    drawn = [torch.rand(SAMPLES, length, WIDTH, generator=generator, device="cuda") for _ in range(2)]
    share = (2.0**21 / (length * WIDTH * WIDTH)) ** 0.5
    a, g = ((x < share / 2).bfloat16() - (x > 1 - share / 2).bfloat16() for x in drawn)
    return a, g


def _waiting(run: Callable[[Tensor, Tensor], Tensor], a_BTd: Tensor, g_BTp: Tensor) -> Callable[[], None]:
    def measured() -> None:
        run(a_BTd, g_BTp)
        torch.cuda.synchronize()

    return measured


def _flops_a_second() -> float:
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / _seconds(partial(torch.mm, x, x))


def _bytes_a_second() -> float:
    x = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return 2 * x.numel() / _seconds(lambda: y.copy_(x))


def _seconds(run: Callable[[], object], repeats: int = 10) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run()
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats
