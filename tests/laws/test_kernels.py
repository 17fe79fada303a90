"""Laws of kernels: right kernels keep them, and each mistake breaks the law that is about it, real Triton ones too."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fsdpcheck.adapters.builtin import reference
from fsdpcheck.case import KernelCase, from_json
from fsdpcheck.case.kernel import KernelSpec
from fsdpcheck.case.profiles import PROFILES
from fsdpcheck.engines.simulated import SimulatedEngine
from fsdpcheck.findings.verdict import Verdict
from fsdpcheck.judging.check import check_law
from fsdpcheck.judging.registry import chapters
from fsdpcheck.judging.run import Run
from fsdpcheck.program import kernel_data
from fsdpcheck.session import run
from fsdpcheck.session.plan import Plan

TOYS = str(Path(__file__).parents[1] / "toys" / "kernel_adapters.py")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton (Linux): pip install 'fsdpcheck[kernels]'"
)
LAWS = [name for name in chapters() if name.startswith("kernels.")]


def judged(name: str, law: str, engine: SimulatedEngine) -> Verdict:
    return check_law(chapters()[law], Run(engine, f"{TOYS}:{name}"), "quick", shrink=False)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", ["right", pytest.param("tiled", marks=needs_triton)])
def test_right_kernels_keep_every_law(name: str, law: str, engine: SimulatedEngine) -> None:
    verdict = judged(name, law, engine)
    assert verdict.status == "holds", verdict
    assert verdict.cases >= PROFILES["quick"]


@pytest.mark.parametrize(
    ("name", "law", "cause"),
    [
        ("half", "kernels.definition", "times the right one"),
        ("half", "kernels.bounded", ""),
        ("rounded", "kernels.bounded", "the norm is rounded to 8 bits, the precision of bfloat16"),
        ("lifted", "kernels.spoiled", "a number takes the place of"),
        ("mixing", "kernels.spoiled", ""),
        ("beside", "kernels.definition", ""),
        pytest.param("unmasked", "kernels.memory", "reads beside", marks=needs_triton),
        pytest.param("unmasked", "kernels.definition", "", marks=needs_triton),
        pytest.param("shifted", "kernels.memory", "beside what it allocated", marks=needs_triton),
        pytest.param("atomic", "kernels.order", "order in which sums are added", marks=needs_triton),
        pytest.param("uncleared", "kernels.memory", "nobody has written", marks=needs_triton),
    ],
)
def test_each_mistake_breaks_the_law_about_it(name: str, law: str, cause: str, engine: SimulatedEngine) -> None:
    verdict = judged(name, law, engine)
    assert verdict.finding is not None, verdict
    assert verdict.finding.kind == "value"
    assert cause in verdict.finding.cause


@pytest.mark.parametrize("installed", [True, False])
def test_without_triton_the_reference_is_not_said_to_keep_the_laws(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = reference.Reference.features
    promising = replace(honest, promises=honest.promises | {"kernels"}, reasons={})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    features = reference._as_installed(promising)
    (reason,) = {chapters()[law].not_promised(features) for law in LAWS}
    said = "no promise 'kernels': triton is not installed, so its kernels are not judged"
    assert reason.partition(";")[0] == ("" if installed else said)


@pytest.mark.parametrize(("name", "said"), [("no_norms", "wanted  a tensor [B]")])
def test_what_is_no_kernel_is_an_error_of_the_adapter(name: str, said: str, engine: SimulatedEngine) -> None:
    verdict = judged(name, "kernels.definition", engine)
    assert (verdict.status, verdict.exit_code) == ("error", 2)
    assert said in verdict.reason


def test_the_definition_is_the_gradient_s_norm_in_exact_arithmetic() -> None:
    spec = KernelSpec(2, 3, 4, 5, "float32", "bfloat16", numbers="real")
    activations, backprops = kernel_data.tensors(spec, 7)
    wanted, sums = kernel_data.exact(spec, 7)
    for sample in range(2):
        found = [
            sum(Fraction(float(g[p])) * Fraction(float(a[d])) for a, g in zip(*pair, strict=True))
            for pair in [(activations[sample], backprops[sample])]
            for p in range(5)
            for d in range(4)
        ]
        assert sum(x * x for x in found) == wanted[sample] <= sums[sample]


@pytest.mark.parametrize("memory", ["contiguous", "turned", "spread", "shared"])
def test_guarded_memory_is_seen_from_outside_alone(memory: str) -> None:
    value = torch.arange(24.0).reshape(2, 3, 4)
    value = value[:, :1].expand_as(value) if memory == "shared" else value
    guarded = kernel_data.Guarded(value, memory)  # type: ignore[arg-type]
    assert torch.equal(guarded.tensor, value)
    assert not guarded.changed
    first = guarded.tensor.storage_offset()
    guarded.tensor.as_strided((1,), (1,), first - 1).fill_(0.0)
    assert guarded.changed


def test_a_case_names_its_kernel_and_comes_back_from_its_text() -> None:
    case = KernelCase(KernelSpec(0, 3, 4, 5, memory=("turned", "shared"), exponents=(-3, 2), repeated=True), 9)
    assert from_json(case.to_json()) == case
    assert "activations [0, 3, 4] float32 turned, backprops [0, 3, 5] float32 shared" in case.describe()


@pytest.mark.nightly
def test_a_finding_of_a_kernel_is_not_said_to_be_seen_on_ranks(engine: SimulatedEngine) -> None:
    events: list[dict[str, object]] = []
    run.run_session(Plan((f"{TOYS}:lifted",), ("kernels.spoiled",)), events.append, engine=engine)
    told = next(event for event in events if event["event"] == "confirmation")
    assert (told["confirmed"], told["note"]) == ("not tried", "kernels run in a process of their own, without ranks")
