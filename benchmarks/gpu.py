"""What a GPU can say of what is written here, in under 20 minutes: a table, and docs/gpu.json.

Whoever has a GPU runs ``tox -e gpu``, or, where torch and Triton are installed and nothing can be, ``python -m
benchmarks gpu`` in a checkout. Rows of docs/gpu.json that are not measured again stay, with the commit they are of.

Rows: the Triton kernels against explicit gradients; their time and memory against cuBLAS (K1 to K3; claim E2), and
which form is the fastest at which shape; ranks on GPUs, simulated ones, those of gloo and those of NCCL (gpu_ranks.py);
memory that nobody has written is poison there too; which collectives gloo offers for CUDA tensors. What a row lacks
skips that row, with the reason.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import gpu_ranks
from benchmarks.gpu_ranks import Skipped
from benchmarks.revision import revision

ROOT: Final = Path(__file__).parent.parent
FILE: Final = ROOT / "docs" / "gpu.json"
_GLOO_SECONDS = 120
NOTHING: Final = "no CUDA device: nothing was run, and nothing is written"


@dataclass(frozen=True)
class Row:
    """``outcome``: "ran", "skipped" or "failed"; ``told`` is what was measured, or why not, ``commit`` of what."""

    name: str
    outcome: str
    seconds: float
    told: list[str] = field(default_factory=list)
    commit: str = ""


def lines(device: str = "cuda", file: str = "", rows: str = "*") -> Iterator[str]:
    """A line a row as it ends, written to ``file`` too: docs/gpu.json, but for the CPU nowhere unless it is named.

    Raises SystemExit: 2 without the device, 1 if a row failed.
    """
    if device == "cuda" and not torch.cuda.is_available():
        yield NOTHING
        raise SystemExit(2)
    where = Path(file) if file else FILE if device == "cuda" else None
    kept = (
        {row["name"]: Row(**row) for row in json.loads(where.read_text())["rows"]} if where and where.exists() else {}
    )
    failed, commit = False, revision(short=False)
    for name, measure in ROWS.items():
        if fnmatchcase(name, rows):
            row = kept[name] = _measured(name, measure, device, commit)
            failed |= row.outcome == "failed"
            yield _text(row)
            if where is not None:
                document = _document(device, [kept[one] for one in ROWS if one in kept])
                where.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if failed:
        raise SystemExit(1)


def _measured(name: str, measure: Callable[[str], list[str]], device: str, commit: str) -> Row:
    started = time.monotonic()
    try:
        outcome, told = "ran", measure(device)
    except Skipped as reason:
        outcome, told = "skipped", [str(reason)]
    except ModuleNotFoundError as missing:
        outcome, told = "skipped", [f"{missing.name} is not installed"]
    except Exception:
        outcome, told = "failed", traceback.format_exc().rstrip().replace(f"{ROOT}/", "").splitlines()
    return Row(name, outcome, round(time.monotonic() - started, 1), told, commit)


def _text(row: Row) -> str:
    head = f"{row.name:<16} {row.outcome:<8} {row.seconds:7.1f} s"
    return "\n".join([head, *(f"    {line}" for line in row.told)])


def _document(device: str, rows: list[Row]) -> dict[str, Any]:
    return {"machine": _machine(device), "versions": _versions(), "rows": [asdict(row) for row in rows]}


def _machine(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": device, "cpu": platform.machine()}
    found = torch.cuda.get_device_properties(0)
    return {
        "device": found.name,
        "capability": f"{found.major}.{found.minor}",
        "gigabytes": round(found.total_memory / 1e9, 1),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "not installed"
    return found


# -- the rows --------------------------------------------------------------------------------------------------------


def _kernels_are_right(device: str) -> list[str]:
    """The tests of the Triton kernels, interpreted on a CPU."""
    import pytest  # noqa: F401 - a missing one is the reason to skip
    import triton  # noqa: F401

    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_INTERPRET": "1"} if device == "cpu" else {"CUDA_VISIBLE_DEVICES": "0"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/impl/kernels/kernels_on_a_device.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    told = done.stdout.rstrip().splitlines()
    if done.returncode:
        raise RuntimeError("\n".join(told[-30:] + done.stderr.splitlines()[-10:]))
    return told[-1:]


def _kernels_are_fast(device: str) -> list[str]:
    """K1 to K3."""
    if device != "cuda":
        raise Skipped("times of kernels need a GPU")
    from benchmarks import kernels

    return [line for text in kernels.lines() for line in text.splitlines()]


def _kernels_chosen(device: str) -> list[str]:
    """The fastest form at each shape; on the CPU, of torch's twins, at small ones."""
    from benchmarks import kernels

    return list(kernels.choices(device) if device == "cuda" else kernels.choices(device, (1, 16, 64), 32))


def _claim(device: str) -> list[str]:
    """Claim E2."""
    if device != "cuda":
        raise Skipped("its ratio of times needs a GPU")
    from fsdpcheck.studies.claims import evaluation, registry

    (row,) = evaluation.judge(registry.chosen(["E2"]))
    if row.verdict == evaluation.ERROR:
        raise RuntimeError(row.trace)
    return [f"{row.verdict}: {row.measured}"]


def _poisoned(device: str) -> list[str]:
    """Memory that nobody has written is NaN on simulated ranks."""
    from fsdpcheck.engines._common import poison

    with poison.of_ranks("poison"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            if not torch.empty(1000, dtype=dtype, device=device).isnan().all():
                raise RuntimeError(f"torch.empty of {dtype} on {device} is not NaN")
    return ["torch.empty of every floating type is NaN"]


def _gloo(device: str) -> list[str]:
    """Collectives of two gloo processes on tensors of the device: which give the right values."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.spawn(_gloo_rank, args=(folder, device), nprocs=2, join=False)
        ended = time.monotonic() + _GLOO_SECONDS
        try:
            while not context.join(timeout=1):
                if time.monotonic() > ended:
                    raise RuntimeError(f"no end in {_GLOO_SECONDS} s; {_noted(folder)}")
        finally:
            for process in context.processes:
                process.kill()
        told = _noted(folder)
        if any("WRONG" in line for line in told):
            raise RuntimeError("\n".join(told))
        return told


def _noted(folder: str) -> list[str]:
    path = Path(folder) / "told"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _gloo_rank(rank: int, folder: str, device: str) -> None:
    warnings.simplefilter("ignore")  # of names that are new in torch 2.13
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, (call, wanted) in _COLLECTIVES.items():
        mine = torch.full((2,), rank + 1.0, device=device)
        try:
            got = call(mine).tolist()
            told = "right" if got == wanted(rank) else f"WRONG: got {got}, wanted {wanted(rank)}"
        except RuntimeError as error:
            told = f"refused: {str(error).splitlines()[0]}"
        if rank == 0:
            with (Path(folder) / "told").open("a", encoding="utf-8") as file:
                file.write(f"{name}: {told}\n")
    dist.destroy_process_group()


def _all_reduce(mine: Tensor) -> Tensor:
    dist.all_reduce(mine)
    return mine


def _broadcast(mine: Tensor) -> Tensor:
    dist.broadcast(mine, 1)
    return mine


def _all_gather(mine: Tensor) -> Tensor:
    whole = mine.new_zeros(4)
    dist.all_gather_into_tensor(whole, mine)
    return whole


def _reduce_scatter(mine: Tensor) -> Tensor:
    part = mine.new_zeros(1)
    dist.reduce_scatter_tensor(part, mine)
    return part


_COLLECTIVES: Final[dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], list[float]]]]] = {
    "all_reduce": (_all_reduce, lambda rank: [3.0, 3.0]),
    "broadcast": (_broadcast, lambda rank: [2.0, 2.0]),
    "all_gather": (_all_gather, lambda rank: [1.0, 1.0, 2.0, 2.0]),
    "reduce_scatter": (_reduce_scatter, lambda rank: [3.0]),
}
"""Name -> the call on [rank + 1, rank + 1] of two ranks, and what it gives."""

ROWS: Final[dict[str, Callable[[str], list[str]]]] = {
    "poison": _poisoned,
    "switches": gpu_ranks.switched,
    "equal bits": gpu_ranks.equal_bits,
    "streams": gpu_ranks.streams_are_ordered,
    "laws": gpu_ranks.laws_hold,
    "hangs": gpu_ranks.hangs_are_told,
    "gloo": _gloo,
    "kernels": _kernels_are_right,
    "kernels K1 K2": _kernels_are_fast,
    "kernels chosen": _kernels_chosen,
    "claim E2": _claim,
}
