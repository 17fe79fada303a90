"""Causes of wrong updates by an optimizer that reads whole matrices or rows: it read shards, or elements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fsdpcheck import oracle
from fsdpcheck.case import TrainingCase
from fsdpcheck.findings.cause import Cause
from fsdpcheck.oracle import Answer, Named


def updated(answer: Answer, step: int, got: Mapping[str, Tensor]) -> Iterator[Cause]:
    """Causes whose parameters after ``step`` are ``got``, bit for bit."""
    case, wanted = answer.case, answer.steps[step]
    if case.step.optimizer.kind not in ("newton_schulz", "row_scaled"):
        return
    size = case.mesh.dp_shard
    texts = {
        "rows of a rank": (size, "each rank updates the rows that it has as if they were the whole matrix"),
        "elements": (
            0,
            "matrices are updated by their gradient, as vectors are: the optimizer met pieces of one dimension",
        ),
    }
    for key, (parts, text) in texts.items():
        found = _by_parts(case, wanted.before, wanted.used, step, parts)
        differs = any(not torch.equal(found[name], wanted.after[name]) for name in found)
        if differs and all(torch.equal(got[name], value) for name, value in found.items()):
            yield Cause(f"matrix optimizer: {key}", text)


def _by_parts(case: TrainingCase, before: Named, gradients: Named, step: int, parts: int) -> Named:
    """Parameters of ``gradients`` after an update of blocks of rows, one a rank; of flattened ones for 0 ``parts``."""

    def cut(named: Named) -> Named:
        if not parts:
            return {name: value.reshape(-1) for name, value in named.items()}
        blocks = {name: torch.split(value, max(1, -(-len(value) // parts))) for name, value in named.items()}
        return {f"{name}/{number}": block for name, own in blocks.items() for number, block in enumerate(own)}

    found = oracle.update(case, cut({name: before[name] for name in gradients}), cut(gradients), step)
    if not parts:
        return {name: value.reshape(gradients[name].shape) for name, value in found.items()}
    names = {name: [key for key in found if key.rpartition("/")[0] == name] for name in gradients}
    return {name: torch.cat([found[key] for key in own]) for name, own in names.items()}
