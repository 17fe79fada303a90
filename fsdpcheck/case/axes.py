"""The axes of a device mesh, and which of them deal the samples out: the whole data map of a parallelism.

Ranks are numbered as ``init_device_mesh`` does it, the axes in the order of ``AXES``, the last one fastest. Another
axis is another row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Axis = Literal["dp_replicate", "dp_shard", "pp", "cp", "tp"]
ModelAxis = Literal["pp", "cp", "tp"]


@dataclass(frozen=True, slots=True)
class AxisRow:
    """What ranks along an axis share out.

    ``same``: they are given the same samples, at every step. ``rows``: each may have some rows of a parameter.
    """

    meaning: str
    same: bool = True
    rows: bool = False


AXES: Final[Mapping[Axis, AxisRow]] = {
    "dp_replicate": AxisRow("replicas, each with samples of its own", same=False),
    "dp_shard": AxisRow("samples, and where parameters are sharded over them also these", same=False, rows=True),
    "pp": AxisRow("stages of a pipeline: layers one after another"),
    "cp": AxisRow("positions of a sequence"),
    "tp": AxisRow("tensors inside of a layer, and in sequence parallel positions between layers", rows=True),
}
"""Every axis, outermost first."""
