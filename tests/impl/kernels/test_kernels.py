"""Norm kernels: the twin in plain torch against explicit gradients, the choice of a form, and what Triton compiles to.

The Triton kernels themselves run in a process of their own (``kernels_on_a_device``): ``TRITON_INTERPRET`` counts only
if it is set before triton is imported, which another test of this process may have done.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdpcheck
from fsdpcheck.impl import kernels
from fsdpcheck.impl.kernels import choice, torch_norms
from fsdpcheck.impl.norms import linear

HERE = Path(__file__).parent
FORMS = [kernels.direct_squared_norm, kernels.half_gram_squared_norm, kernels.bmm_squared_norm, kernels.squared_norm]
SHAPES = [(0, 3, 4, 5), (2, 0, 3, 4), (2, 3, 0, 4), (1, 1, 1, 1), (3, 1, 6, 2), (3, 5, 7, 9), (4, 20, 3, 1)]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (Linux): pip install 'fsdpcheck[kernels]'"
)


def integers(B: int, T: int, d: int, p: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Activations and backprops whose products and sums are exact in float32."""
    generator = torch.Generator().manual_seed(B + T + d + p)
    a_BTd, g_BTp = (torch.randint(-3, 4, (B, T, f), generator=generator).to(dtype) for f in (d, p))
    return a_BTd, g_BTp


def explicit(a_BTd: Tensor, g_BTp: Tensor) -> Tensor:
    """[B] float64: from the gradients themselves."""
    return (g_BTp.double().transpose(1, 2) @ a_BTd.double()).square().sum((1, 2))


@pytest.fixture(params=[torch_norms.TILE, 64, 2], ids=lambda numbers: f"tiles of {numbers}")
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(torch_norms, "TILE", request.param)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return int(request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_the_twin_has_the_bits_of_the_explicit_form(
    form: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, tile: int
) -> None:
    wanted_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    for shape in SHAPES:
        a_BTd, g_BTp = integers(*shape, dtype)
        assert kernels.implementation(a_BTd, g_BTp) is torch_norms
        got = form(a_BTd, g_BTp)
        assert got.dtype == wanted_dtype
        assert torch.equal(got, explicit(a_BTd, g_BTp).to(wanted_dtype)), shape


def test_exact_data_show_a_square_taken_before_the_sum_is_complete(tile: int) -> None:
    """The split-K bug, planted: partial sums over T are squared, then added."""
    a_BTd, g_BTp = integers(3, 6, 7, 9, torch.float32)
    for form in FORMS:
        planted = form(a_BTd[:, :3], g_BTp[:, :3]) + form(a_BTd[:, 3:], g_BTp[:, 3:])
        assert not torch.equal(planted, explicit(a_BTd, g_BTp).float())


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.numbers = max(self.numbers, out.numel())
        return out


@pytest.mark.parametrize("form", FORMS[:2])
def test_the_twin_never_holds_a_gradient(form: Callable[[Tensor, Tensor], Tensor]) -> None:
    a_BTd, g_BTp = integers(2, 3, 600, 700, torch.float32)
    with Largest() as largest:
        form(a_BTd, g_BTp)
    assert 0 < largest.numbers <= torch_norms.TILE < 600 * 700
    with Largest() as largest:
        kernels.bmm_squared_norm(a_BTd, g_BTp)
    assert largest.numbers == 2 * 600 * 700


def test_workspace_of_the_twin_is_a_thousandth_of_the_gradients() -> None:
    samples, columns = torch_norms.direct_tile(4096, 4096)
    assert samples * 4096 * columns <= 1e-3 * 8 * 4096 * 4096


@pytest.mark.parametrize("form", FORMS)
def test_a_sample_with_nan_has_norm_nan_and_others_are_untouched(form: Callable[[Tensor, Tensor], Tensor]) -> None:
    a_BTd, g_BTp = integers(3, 5, 4, 6, torch.float32)
    wanted = form(a_BTd, g_BTp)
    a_BTd[1, 2, 0] = float("nan")
    got = form(a_BTd, g_BTp)
    assert got.isnan().tolist() == [False, True, False]
    assert torch.equal(got[[0, 2]], wanted[[0, 2]])


def test_no_gradient_flows() -> None:
    a_BTd, g_BTp = integers(2, 3, 4, 5, torch.float32)
    assert not kernels.squared_norm(a_BTd.requires_grad_(), g_BTp).requires_grad


@pytest.mark.parametrize("frozen", ["", "weight", "bias", "weight bias"])
@pytest.mark.parametrize("positions", [(), (3,), (2, 3)])
def test_the_rule_of_linear_gives_one_norm_with_and_without_kernels(positions: tuple[int, ...], frozen: str) -> None:
    module = nn.Linear(4, 5)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    a, g = integers(6, torch.Size(positions).numel(), 4, 5, torch.float32)
    a, g = a.view(6, *positions, 4), g.view(6, *positions, 5)
    wanted = linear.squared_norm(module, a.double(), g.double())
    assert torch.equal(linear.flash_squared_norm(module, a.double(), g.double()), wanted)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(linear.flash_squared_norm(module, a.to(dtype), g.to(dtype)), wanted.float())


@pytest.mark.parametrize(
    ("activations", "backprops", "error", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 3), ValueError, r"got activations \[2, 3\].*wanted \[B, T, d\]"),
        (torch.ones(2, 3, 4), torch.ones(2, 1, 4), ValueError, r"backprops \[2, 1, 4\]"),
        (torch.ones(2, 3, 4).long(), torch.ones(2, 3, 4), TypeError, r"torch\.int64 on cpu"),
        (torch.ones(2, 3, 4, device="meta"), torch.ones(2, 3, 4), TypeError, "wanted floating point on one device"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_other_inputs_are_refused(
    form: Callable[[Tensor, Tensor], Tensor], activations: Tensor, backprops: Tensor, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        form(activations, backprops)


def test_the_rule_chooses_half_gram_where_it_needs_a_quarter_of_the_operations() -> None:
    cpu = torch.device("cpu")
    found = {T: choice.form(T, 4096, 4096, torch.float32, cpu) for T in (1, 1024, 1025, 4096)}
    assert found == {1: "half_gram", 1024: "half_gram", 1025: "direct", 4096: "direct"}
    assert choice.form(1, 1, 1, torch.float32, cpu) == "half_gram"
    assert choice.form(2, 1, 1, torch.float32, cpu) == "direct"


@pytest.mark.nightly
def test_a_measured_choice_holds_for_its_shape_alone_until_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measured", {})
    a_BTd, g_BTp = integers(2, 3, 4, 5, torch.float32)
    calls: list[str] = []

    def slow(a: Tensor, g: Tensor) -> Tensor:
        calls.append("slow")
        return torch.stack([kernels.direct_squared_norm(a, g) for _ in range(100)])[0]

    table = choice.measure(a_BTd, g_BTp, {"direct": slow, "bmm": lambda a, g: a}, repeats=3)
    assert table == {choice.Shape(3, 4, 5, "float32", "cpu"): "bmm"}
    assert calls == ["slow"] * 4
    choice.install(table)
    cpu = torch.device("cpu")
    assert choice.form(3, 4, 5, torch.float32, cpu) == "bmm"
    assert choice.form(3, 4, 5, torch.bfloat16, cpu) == choice.form(4, 4, 5, torch.float32, cpu) == "direct"
    assert torch.equal(kernels.squared_norm(a_BTd, g_BTp), explicit(a_BTd, g_BTp).float())
    with pytest.raises(ValueError, match="wanted one of"):
        choice.install({choice.Shape(3, 4, 5, "float32", "cpu"): "fast"})  # type: ignore[dict-item]
    choice.install({})
    assert choice.form(3, 4, 5, torch.float32, cpu) == "direct"


def _child(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    above = Path(fsdpcheck.__file__).parent.parent  # the copy under test, be it a wheel's or the checkout's
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": str(above), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


INTERPRETED = {"TRITON_INTERPRET": "1"}
WHERE = [
    pytest.param(INTERPRETED, "not nightly", id="interpreted"),
    pytest.param(INTERPRETED, "nightly", id="interpreted, by night", marks=pytest.mark.nightly),
    pytest.param({}, "", id="on a GPU", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


@needs_triton
@pytest.mark.parametrize(("environment", "marked"), WHERE)
def test_the_triton_kernels(environment: dict[str, str], marked: str) -> None:
    file = str(HERE / "kernels_on_a_device.py")
    options = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "pythonpath=", "-m", marked]
    run = _child("-m", "pytest", *options, file, **environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


_COMPILE = """
import json, sys
from fsdpcheck.impl import norms

norms.rules()
print("triton" in sys.modules)
try:
    import triton
except ImportError:
    sys.exit()
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fsdpcheck.impl.kernels import triton_norms

def words(kernel, dtype):
    tiles = triton_norms.FULL_TILES if dtype == "fp32" else triton_norms.HALF_TILES
    constants = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "SIDE": tiles.rows, "DEPTH": tiles.depth}
    constants |= {"WIDEN": False, "a_d": 1, "g_p": 1}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    pointers = {"a_ptr": "*" + dtype, "g_ptr": "*" + dtype, "partials_ptr": "*fp32"}
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    source = ASTSource(kernel, types, constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return [word for word in ("tf32", "atom.", " red.", "\tred.", ".local", "wgmma.mma_async") if word in ptx]

for name, dtype in json.loads(sys.argv[1]):
    print(name, dtype, words(getattr(triton_norms, name), dtype))
"""
COMPILED = [(kernel, dtype) for kernel in ("_direct_partials", "_half_gram_partials") for dtype in ("bf16", "fp32")]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Whether the rules import triton, then what of interest is in each compiled kernel: one process tells all."""
    run = _child("-c", _COMPILE, json.dumps(COMPILED), TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.nightly
def test_triton_is_not_imported_before_a_kernel_is_used(told: list[str]) -> None:
    assert told[0] == "False"


@pytest.mark.nightly
@needs_triton
def test_what_is_compiled_for_a_gpu_has_no_atomics_no_tf32_and_no_spills(told: list[str]) -> None:
    """Compiled without a GPU. (``red.`` is a reduction into memory, as unordered as ``atom.``.)"""
    wanted = {"bf16": ["wgmma.mma_async"], "fp32": []}
    assert told[1:] == [f"{kernel} {dtype} {wanted[dtype]}" for kernel, dtype in COMPILED]
