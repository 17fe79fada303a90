"""The smallest case as a picture: ranks side by side, which sample each has in which micro-batch, and its shards."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from fsdpcheck.case import TrainingCase, from_json
from fsdpcheck.findings.verdict import Finding
from fsdpcheck.report.page.picture import Picture, cut

_RANKS: Final = 12
"""Most ranks that are drawn."""
_SAMPLES: Final = 8
"""Most samples of a micro-batch that are drawn."""
_MICRO: Final = 4
"""Most micro-batches that are drawn."""
_PARAMETERS: Final = 8
"""Most parameters that are drawn."""
_ROWS: Final = 6
"""Most rows of a shard that are drawn one by one."""
_TIMES: Final = " \N{MULTIPLICATION SIGN} "
_NAME: Final = 20
"""Characters of a parameter's name that are drawn."""
_LEFT, _COLUMN, _CHIP, _GAP, _ROW = 160.0, 128.0, 26.0, 12.0, 12.0


def drawn(finding: Finding) -> Picture | None:
    """The case of a finding; None for one that trains nothing, is of another release, or cannot be drawn.

    The case may come from a file that anybody wrote, and no picture is worth the page.
    """
    try:
        case = from_json(json.dumps(finding.case))
        return of_case(case, _ranks_named(finding.where), finding.where) if isinstance(case, TrainingCase) else None
    except Exception:
        return None


def of_case(case: TrainingCase, marked: Sequence[int] = (), where: str = "") -> Picture:
    """Samples and shards of the first step. ``marked``: ranks that are drawn as those of which the finding tells."""
    ranks = min(case.world_size, _RANKS)
    picture = Picture("The smallest case", _told(case))
    for rank in range(ranks):
        look = "head bad" if rank in marked else "head"
        picture.text(_middle(rank), 14, f"rank {rank}", look, "middle")
    below = _shards(picture, case, ranks, where, _samples(picture, case, ranks, where))
    for rank in (one for one in marked if one < ranks):
        picture.rect(_left(rank) - 7, -1, _COLUMN - 2, below, "mark", radius=6)
    if case.world_size > ranks:
        picture.text(_left(ranks), 14, f"and {case.world_size - ranks} more", "soft")
    return picture


def _told(case: TrainingCase) -> str:
    sizes = "+".join(map(str, case.local_sizes[:_RANKS]))
    return f"{case.world_size} ranks; a batch of {case.layout.batch_size} samples, as {sizes} on the ranks"


def _samples(picture: Picture, case: TrainingCase, ranks: int, where: str) -> float:
    """The samples of the first step; returns where the next row begins."""
    from fsdpcheck.workload import batches  # imports torch

    of_ranks = batches.indices(case, 0)[:ranks]
    often = Counter(batches.logical_batch(case, 0))
    named = {int(number) for number in re.findall(r"(?:sample|record) (\d{1,9})\b", where)}
    y = 26.0
    for micro in range(min(case.step.micro_batches, _MICRO)):
        title = "samples" if case.step.micro_batches == 1 else f"micro-batch {micro}"
        picture.text(0, y + 17, title, "soft")
        tall = max((math.ceil(min(len(own[micro]), _SAMPLES) / 4) for own in of_ranks), default=1)
        for rank, own in enumerate(of_ranks):
            _chips(picture, _left(rank), y, own[micro], often, named)
        y += max(tall, 1) * (_CHIP + 4) + _GAP
    if case.step.micro_batches > _MICRO:
        picture.text(0, y + 12, f"and {case.step.micro_batches - _MICRO} micro-batches more", "soft")
        y += 20
    return y


def _chips(
    picture: Picture, x: float, y: float, samples: Sequence[int], often: Mapping[int, int], named: set[int]
) -> None:
    if not samples:
        picture.rect(x, y, _COLUMN - 16, _CHIP, "empty", "no sample of this rank")
        picture.text(x + (_COLUMN - 16) / 2, y + 16, "no sample", "soft", "middle")
    for place, sample in enumerate(samples[:_SAMPLES]):
        left, top = x + place % 4 * (_CHIP + 1), y + place // 4 * (_CHIP + 4)
        again = often[sample] > 1
        look = "chip bad" if sample in named else "chip again" if again else "chip"
        told = f"sample {sample}" + (f", {often[sample]} times in the batch" if again else "")
        picture.rect(left, top, _CHIP - 1, _CHIP, look, told)
        picture.text(left + (_CHIP - 1) / 2, top + 16, str(sample), "onchip", "middle")
    if len(samples) > _SAMPLES:
        picture.text(x, y + 2 * (_CHIP + 4) + 10, f"and {len(samples) - _SAMPLES} more", "soft")


def _shards(picture: Picture, case: TrainingCase, ranks: int, where: str, y: float) -> float:
    """Rows of each parameter as they are dealt out along dp_shard; returns where the picture ends."""
    if case.mesh.axes:
        shared = ", ".join(axis for axis, _ in case.mesh.axes)
        picture.text(0, y + 14, f"shards not drawn: parameters are shared out along {shared} as well", "soft")
        return y + 22
    shapes = _parameters(case)
    for name, shape in [*shapes.items()][:_PARAMETERS]:
        picture.text(0, y + 12, cut(name, _NAME), "name bad" if name in where else "name", told=name)
        picture.text(0, y + 27, _TIMES.join(map(str, shape)), "soft")
        y += max(_of_parameter(picture, case, ranks, shape[0], y), 30) + _GAP
    if len(shapes) > _PARAMETERS:
        picture.text(0, y + 12, f"and {len(shapes) - _PARAMETERS} parameters more", "soft")
        y += 20
    return y


def _parameters(case: TrainingCase) -> dict[str, tuple[int, ...]]:
    """Shapes by name, without the harness's own layer; of a user's model the rows that are known."""
    if case.model.own is not None:
        return {f"parameter {number}": (rows,) for number, rows in enumerate(case.model.own.rows)}
    from fsdpcheck.workload import models  # imports torch

    shapes = models.parameter_shapes(case)
    return {name: shape for name, shape in shapes.items() if shape and "instrument" not in name}


def _of_parameter(picture: Picture, case: TrainingCase, ranks: int, rows: int, y: float) -> float:
    """One parameter's shards; returns how tall they are."""
    size = case.mesh.dp_shard
    chunk = math.ceil(rows / size)
    for rank in range(ranks):
        place = rank % size
        begin, end = min(place * chunk, rows), min((place + 1) * chunk, rows)
        _rows(picture, _left(rank), y, begin, end, chunk if size > 1 else end - begin)
    return _ROW * min(chunk, _ROWS) + 16


def _rows(picture: Picture, x: float, y: float, begin: int, end: int, chunk: int) -> None:
    own, padding, wide = end - begin, chunk - (end - begin), _COLUMN - 16
    told = (f"rows {begin}-{end - 1}" if own > 1 else f"row {begin}" if own else "no row") + (
        f", {padding} of padding" if padding else ""
    )
    if chunk <= _ROWS:
        for row in range(chunk):
            picture.rect(x, y + _ROW * row, wide, _ROW - 2, "shard" if row < own else "padding", told, 2)
    else:
        whole = _ROW * _ROWS - 2
        picture.rect(x, y, wide, whole, "padding", told, 2)
        picture.rect(x, y, wide, own / chunk * whole, "shard", told, 2)
    words = told if not padding else f"{own} row{'s' * (own > 1)}, {padding} pad" if own else f"{padding} pad"
    picture.text(x, y + _ROW * min(chunk, _ROWS) + 10, words, "tiny")


def _left(rank: int) -> float:
    return _LEFT + rank * _COLUMN


def _middle(rank: int) -> float:
    return _left(rank) + (_COLUMN - 16) / 2


def _ranks_named(where: str) -> list[int]:
    """Ranks of which a sentence tells, but not those that only finished."""
    return sorted({int(found) for found in re.findall(r"\brank (\d{1,4})\b(?! finished)", where)})
