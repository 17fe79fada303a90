"""The names of a pipeline's parameters: those of the whole model, of which each rank knows its stages alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fsdpcheck.comparison.record import Key, RankRecord

_OF_A_STAGE = re.compile(r"stage (\d+)\.(.+)", re.DOTALL)


def with_names_of_the_whole(ranks: Sequence[RankRecord]) -> tuple[RankRecord, ...]:
    """The same records, in which names of stages are those of the whole model.

    Where stages keep the names that the whole has for their parts, those are it. Where two stages share a name, each
    numbers its parts from zero: then a parameter is called by its number among those of all stages, in their order,
    which is the same however many stages there are.
    """
    stages: dict[int, dict[str, None]] = {}
    for record in ranks:
        for key in record.pieces:
            if key.kind == "initial parameter" and (found := _OF_A_STAGE.fullmatch(key.name)):
                stages.setdefault(int(found[1]), {})[found[2]] = None
    paths = [(stage, path) for stage in sorted(stages) for path in stages[stage]]
    if not paths:
        return tuple(ranks)
    are_clear = len({path for _, path in paths}) == len(paths)
    names = {
        f"stage {stage}.{path}": path if are_clear else f"parameter {place} of the pipeline"
        for place, (stage, path) in enumerate(paths)
    }
    return tuple(_renamed(record, names) for record in ranks)


def _renamed(record: RankRecord, names: dict[str, str]) -> RankRecord:
    def of(key: Key) -> Key:
        return key._replace(name=names.get(key.name, key.name))

    return replace(
        record,
        pieces={of(key): piece for key, piece in record.pieces.items()},
        calls={of(key): calls for key, calls in record.calls.items()},
        lines={of(key): line for key, line in record.lines.items()},
        exact={of(key) for key in record.exact},
        seats={names.get(name, name): seat for name, seat in record.seats.items()},
    )
