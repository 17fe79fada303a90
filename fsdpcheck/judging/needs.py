"""What a user's functions need that is not here, and in which dtypes they reduce: errors that name it, no findings.

An adapter declares what its implementation takes, and raising on that is a finding. Functions declare nothing
(``Features.functions``), so what they cannot run with is read off the run: no GPU, no float64, a package or a compiler
that is missing. So is a reduction in fewer bits than parameters have, of which the exact laws know no right answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from fsdpcheck.adapters.contract import ArithmeticRule, Features
from fsdpcheck.case import TrainingCase
from fsdpcheck.errors import AdapterError, explain
from fsdpcheck.execution import Execution, Failure, RunRequest

_GPU: Final = re.compile(r"cuda|nccl|nvidia|\bgpus?\b|\bxpu\b|accelerator", re.IGNORECASE)
"""What torch says where a device is wanted that is not there, or where tensors lie on one and on the CPU."""
_IMPORTS: Final = ("ModuleNotFoundError", "ImportError")
_TOOLS: Final = re.compile(
    r"ninja is required|no (working )?c\+\+ compiler|InvalidCxxCompiler|compiler not found|error building extension"
    r"|No such file or directory: '?(\S*/)?(c\+\+|g\+\+|gcc|clang\+*|cl|nvcc|ninja|cmake)(?![\w.])",
    re.IGNORECASE,
)
"""What torch's extensions and inductor say, and the system of a program that is not installed. Tried: 2.13.0."""
_HALVES: Final = ("bfloat16", "float16")
_REDUCING: Final = ("all_reduce", "reduce_scatter", "reduce")
_NEXT_OF_GPU: Final = (
    "let the functions ask where they are: mesh.device_type, or the device of model.parameters(); kernels of a GPU are"
    " judged on one alone"
)
_NEXT_OF_PREMULTIPLIED: Final = (
    "where gradients are divided by another number than that of ranks (set_gradient_divide_factor), ask each FSDPModule"
    " for a sum: module.set_force_sum_reduction_for_comms(True)"
)


def require_fit(features: Features, execution: Execution, again: Callable[[RunRequest], Execution]) -> None:
    """Raise AdapterError where functions lack something here, or reduce in a dtype that nothing says.

    ``again`` runs a request without being noted: what raises in float64 is tried in float32.
    """
    if not features.functions or not isinstance(execution.request.case, TrainingCase):
        return
    what = f"the functions of {execution.request.adapter.rpartition('/')[2]!r}"
    _require_reductions_said(what, features.arithmetic, execution)
    failure = execution.failure
    if failure is None or failure.kind != "raised":
        return
    raised = [rank for rank in failure.ranks if rank.state == "raised" and rank.stack]
    for found in _lacks(failure, [rank.stack[-1].strip() for rank in raised]):
        got, wanted, then = found
        where = raised[0].where
        raise AdapterError(explain(f"{what} cannot run here", got=got, wanted=wanted, where=where, then=then))
    _require_float64(what, execution, failure, again)


def _lacks(failure: Failure, told: list[str]) -> Iterator[tuple[str, str, str]]:
    """(got, wanted, next) of what is not here, if that is what all ranks that raised tell."""
    if not told:
        return
    if all("PREMUL_SUM" in one for one in told):
        yield told[0], "reductions that gloo has", _NEXT_OF_PREMULTIPLIED
    if all(map(_GPU.search, told)):
        yield told[0], "functions that run on a CPU, where simulated ranks are", _NEXT_OF_GPU
    if all(one.startswith(_IMPORTS) for one in told):
        yield told[0], "the package", "install it beside fsdpcheck, or import it where it is needed alone"
    if all(map(_TOOLS.search, told)):
        then = "install it, or name a function that builds nothing: without torch.compile, without extensions"
        yield told[0], "the compiler or build tool", then


def _require_float64(
    what: str, execution: Execution, failure: Failure, again: Callable[[RunRequest], Execution]
) -> None:
    """Raise AdapterError for what raises on a case of float64 and not, or elsewhere, on the same in float32."""
    case = execution.request.training
    if case.arithmetic.dtype != "float64":
        return
    narrow = replace(case, arithmetic=replace(case.arithmetic, dtype="float32"))
    other = again(replace(execution.request, case=narrow)).failure
    if other is not None and (other.kind, other.exception) == (failure.kind, failure.exception):
        return
    ranks = [rank for rank in failure.ranks if rank.state == "raised" and rank.stack]
    got = f"{ranks[0].stack[-1].strip()} in float64, and not in float32" if ranks else "raised in float64 alone"
    where = ranks[0].where if ranks else ""
    then = "say so: --param-dtype float32 has cases of float32 alone drawn"
    raise AdapterError(explain(f"{what} take no float64", got=got, wanted="both dtypes", where=where, then=then))


def _require_reductions_said(what: str, rule: ArithmeticRule, execution: Execution) -> None:
    """Raise AdapterError for gradients that are reduced in other dtypes than parameters have, where nothing says so."""
    own: str = execution.request.training.arithmetic.dtype
    if execution.failure is not None:
        return
    says = "nothing says so" if rule.dtypes == ArithmeticRule().dtypes else "float32 is what was said"
    for result in execution.ranks:
        for call in result.trace:
            others = {name for name, _ in call.inputs if name in ("float32", "float64", *_HALVES) and name != own}
            if call.op not in _REDUCING or not others or (call.op == "all_reduce" and not others & {*_HALVES}):
                continue
            name = sorted(others)[0]
            then = "leave it out where fsdpcheck judges: what rounds in a sum depends on the order of ranks"
            if name == "float32":
                then = "say so: --reduce-dtype float32 has cases of float32 drawn"
            else:
                then = f"reduce in float32 and say --reduce-dtype float32, or {then}"
            raise AdapterError(
                explain(
                    f"{what} reduce in {name}, and {says}",
                    got=f"rank {result.rank}: {call}",
                    wanted=f"reductions in {own}, as parameters are",
                    where=call.where,
                    then=then,
                )
            )
