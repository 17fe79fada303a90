"""One small relative error in the gradients of the last rank, of known sizes, in scripts of several precisions."""

from __future__ import annotations

from typing import Final

from benchmarks.compared.planted import Bug

SIZES: Final = (1e-3, 1e-6, 1e-9, 1e-12)
_PLACES: Final = {
    "ddp_mlp": "        loss = F.mse_loss(model(inputs[rows]), targets[rows])\n",
    "fsdp2_transformer": "        loss = F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))\n",
    "fsdp2_bf16": "            loss = F.mse_loss(model(x[rows]).float(), y[rows]) / micro_batches\n",
    "grad_scaler": "        loss = nn.functional.mse_loss(output.float(), y)\n",
}
"""The line of a script that makes the loss of a rank."""


def _error(script: str, size: float) -> Bug:
    line = _PLACES[script]
    indent = line[: len(line) - len(line.lstrip())]
    scaled = f"{indent}if world_size > 1 and rank == world_size - 1:\n{indent}    loss = loss * (1 + {size!r})\n"
    return Bug(
        f"{script}_error_{size:.0e}", script, "small error", "gradient",
        f"the loss of the last rank, and so its part of every gradient, is too large by {size:.0e} of itself",
        ((line, line + scaled),), (2, 3, 4), size=size,
    )  # fmt: skip


BUGS: Final = tuple(_error(script, size) for script in _PLACES for size in SIZES)
