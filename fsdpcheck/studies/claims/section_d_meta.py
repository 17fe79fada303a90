"""Section D, models on the meta device: sharded without memory, then filled, and initialised by the first forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab
from fsdpcheck.studies.claims.registry import Outcome, claim, verdict
from fsdpcheck.studies.claims.section_d import sharded, single, step


@claim(
    "D7", "Models are built on the meta device, sharded, then given memory and values; the first forward initialises."
)
def meta_device(lab: Lab) -> Outcome:
    """The same step from a model on the meta device; its bytes before and after it gets memory; who asks for it.

    The first forward initialises: it is what refuses a model that is still on meta, and it makes its module the root,
    so that a unit's own forward before the root's leaves no root.
    """

    def body(rank: int) -> tuple[dict[str, Tensor], int, int]:
        module = sharded(_on_meta())
        before = sum(not p.is_meta for p in module.parameters())
        module.to_empty(device="cpu")
        mesh = init_device_mesh("cpu", (3,))
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), toys.network().parameters(), strict=True):
                parameter.copy_(distribute_tensor(value.detach(), mesh, [Shard(0)]))
        held = sum(p.to_local().nbytes for p in module.parameters())
        return step(module, rank, 3), before, held

    found = lab.ranks(body, 3)
    apart = max(toys.different(values, single()) for values, _, _ in found)
    total = sum(p.nbytes for p in toys.network().parameters())
    held = sum(bytes_ for _, _, bytes_ in found)
    fine = apart == 0 and held == total and not any(before for _, before, _ in found)
    unfilled, unit_first = lab.ranks(_first_forward_of_meta, 1)[0], lab.ranks(_unit_first, 1)[0]
    first = "meta" in unfilled and "lazily initialized" in unit_first
    return Outcome(
        verdict(fine and first),
        f"W = 3: {found[0][1]} parameters have memory after fully_shard on meta; to_empty gives the ranks {held} bytes"
        f" in all, the model has {total}; after a step {apart} elements differ from the single device's; the first"
        f" forward of a model without memory: {unfilled or 'runs'}; of a root whose unit has run before:"
        f" {unit_first or 'runs'}",
    )


def _on_meta() -> Any:
    with torch.device("meta"):
        return nn.Sequential(
            nn.Sequential(nn.Linear(3, 5), nn.ReLU()), nn.Sequential(nn.Linear(5, 3), nn.ReLU()), nn.Linear(3, 2)
        ).double()


def _first_forward_of_meta(rank: int) -> str:
    """What the forward of a model that was given no memory raises; sharding it raises nothing."""
    module = sharded(_on_meta())
    return _raised(lambda: module(torch.ones(1, 3, dtype=torch.float64, device="meta")))


def _unit_first(rank: int) -> str:
    """What the root's first forward raises after a forward of one of its units alone."""
    module, x = sharded(toys.network()), torch.ones(1, 3).double()
    module[0](x)
    return _raised(lambda: module(x))


def _raised(call: Callable[[], Any]) -> str:
    """The first sentence of a RuntimeError; "" if none is raised."""
    try:
        call()
    except RuntimeError as error:
        return " ".join(str(error).partition(",")[0].split())
    return ""
