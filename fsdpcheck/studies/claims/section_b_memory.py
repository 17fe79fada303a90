"""Section B, what ranks hold: bytes, views and aliases; and whether training gets anywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdpcheck.studies.claims import toys
from fsdpcheck.studies.claims.lab import Lab, impl
from fsdpcheck.studies.claims.registry import Outcome, claim, only_if, verdict


@claim(
    "B6",
    "Memory a rank is 2, 4, 8 times smaller at W = 2, 4, 8; 505M parameters in fp32 at W = 8 take 252.5 MB; ZeRO-3"
    " turns"
    " 4N into 4N/W.",
)
def memory_a_rank(lab: Lab) -> Outcome:
    """Bytes behind the live shards, by model; and the account of 505M parameters on the meta device."""
    worlds = (2, 4, 8)
    even, uneven = ({w: _ratio(lab, hidden, w) for w in worlds} for hidden in (8, 5))
    big = _half_a_billion()
    units = [str(position) for position in range(len(big))]
    account = impl("costs.memory").flat_account(big, units, 8, states=2)
    numel = sum(parameter.numel() for parameter in big.parameters())
    states = account.parameters + account.gradients + account.optimizer_state
    exact = all(ratio == w for w, ratio in even.items())
    return Outcome(
        only_if(
            "W divides the elements of every unit", under_it=exact, otherwise=all(r == w for w, r in uneven.items())
        ),
        f"live bytes of one rank over W ranks: {_ratios(even)} where W divides every unit, {_ratios(uneven)} where not;"
        f" {numel / 1e6:.1f}M parameters at W = 8: {account.parameters / 1e6:.1f} MB, of which {account.padding} bytes"
        f" are padding, against {numel * 4 / 8 / 1e6:.1f} by 4n/W; with gradients and Adam {states / 1e6:.1f} MB"
        f" = {states / (16 * numel):.4f} of 16n",
    )


def _ratio(lab: Lab, hidden: int, world_size: int) -> float:
    """Bytes that one rank alone holds over the most that one of W ranks does."""

    def held(rank: int) -> int:
        model = toys.flat(_wide(hidden))
        return _bytes([shard for shard in model.shards()])

    alone: int = lab.ranks(held, 1)[0]
    most: int = max(lab.ranks(held, world_size))
    return alone / most


def _wide(hidden: int) -> nn.Sequential:
    """hidden 8: units of 64 and 64 elements, a root of 16; 5: of 25, 25 and 10."""
    inner = [nn.Sequential(nn.Linear(hidden, hidden, bias=False)) for _ in range(2)]
    return nn.Sequential(*inner, nn.Linear(hidden, 2, bias=False))


def _half_a_billion() -> nn.Sequential:
    """32 layers of width 1024 and a vocabulary of 50,000, without any memory."""
    with torch.device("meta"):
        blocks = [nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True) for _ in range(32)]
        return nn.Sequential(nn.Embedding(50_000, 1024), *blocks, nn.Linear(1024, 50_000, bias=False))


def _ratios(found: dict[int, float]) -> str:
    return ", ".join(f"{ratio:.3f} at W={w}" for w, ratio in found.items())


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())


@claim(
    "B7", "all_gather() makes an unpadded view, reshard() frees it and keeps the shard; W=1 aliases, nothing is cloned."
)
def gathered_views_are_freed(lab: Lab) -> Outcome:
    """Storages behind parameters: gathered, freed, after the forward, backward and step of a training, W = 1 and 3."""
    one, many = lab.ranks(_storages, 1)[0], lab.ranks(_storages, 3)
    alias = one["aliases"] and not any(one["alive"].values())
    root, first = many[0]["root"], many[0]["first"]
    wanted = {moment: 0 for moment in _MOMENTS} | {"forward": root, "reduction": root + first}
    freed = all(rank["alive"] == wanted for rank in many)
    views = all(rank["views"] and rank["unpadded"] and rank["kept"] and not rank["aliases"] for rank in many)
    after = ", ".join(f"{max(rank['alive'][m] for rank in many)} after {m}" for m in _MOMENTS)
    return Outcome(
        verdict(alias and freed and views),
        f"W = 3: parameters are views of the gathered buffers: {views}, whose bytes are {after}, where those of the"
        f" root ({root}) are kept between forward and backward, and those of the first unit ({first}), which gives no"
        f" gradient to anyone, until the backward is over; the shard keeps its address:"
        f" {all(rank['kept'] for rank in many)}; W = 1: the buffer is the shard itself, and no byte beside it is alive"
        f" then: {alias}",
    )


_MOMENTS = ("init", "reshard", "forward", "reduction", "backward", "step")


def _storages(rank: int) -> dict[str, Any]:
    model = toys.flat(toys.network())
    buffers = [unit.trainable for unit in model.units]
    addresses = [buffer.shard.data_ptr() for buffer in buffers]
    aliases = all(buffer.full.data_ptr() == buffer.shard.data_ptr() for buffer in buffers)

    def bytes_alive(buffers: list[Any]) -> int:
        """Bytes gathered beyond the shards themselves."""
        apart = [b.full.untyped_storage() for b in buffers if b.full.data_ptr() != b.shard.data_ptr()]
        return sum(storage.nbytes() for storage in apart)

    alive = {"init": bytes_alive(buffers)}
    found: dict[str, Any] = {"aliases": aliases, "alive": alive}
    for unit in model.units:
        unit.unshard()
    pairs = [(buffer, parameter) for buffer in buffers for parameter in buffer.parameters]
    found["views"] = all(p.untyped_storage().data_ptr() == b.full.untyped_storage().data_ptr() for b, p in pairs)
    found["unpadded"] = all(sum(p.numel() for p in b.parameters) == b.numel for b in buffers)
    found["root"], found["first"] = bytes_alive(buffers[:1]), bytes_alive(buffers[1:2])
    for unit in model.units:
        unit.reshard()
    alive["reshard"] = bytes_alive(buffers)
    noted = {"after_forward": "forward", "after_reduce": "reduction", "after_reshard": "backward"}

    def note(moment: str) -> None:
        if moment in noted:
            alive[noted[moment]] = bytes_alive(buffers)

    trainer = toys.trainer(model, notify=note)
    trainer.step(toys.micro_batches([toys.share(rank, model.axis.size)]))
    alive["step"] = bytes_alive(buffers)
    found["kept"] = addresses == [buffer.shard.data_ptr() for buffer in buffers]
    return found


@claim("B8", "Training converges at W = 1, 2, 4, 8 (a smoke test, and no evidence of anything else).")
def training_converges(lab: Lab) -> Outcome:
    """Sixty steps of linear regression on data that a line explains."""
    losses = {w: lab.ranks(_regression, w)[0] for w in (1, 2, 4, 8)}
    shown = ", ".join(f"W={w}: {first:.3g} to {last:.1e}" for w, (first, last) in losses.items())
    return Outcome(verdict(all(last < first / 1000 for first, last in losses.values())), f"loss over 60 steps, {shown}")


def _regression(rank: int) -> tuple[float, float]:
    """(loss before, loss after) over the whole batch, on this rank."""
    samples = 16
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(5)).double()
    y = x @ torch.tensor([[1.0, -2.0], [0.5, 3.0], [2.0, 1.0]]).double()
    model = toys.flat(nn.Sequential(nn.Sequential(nn.Linear(3, 2, bias=False)).double()), units=["0"])
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.3, foreach=False)  # noqa: E731
    trainer = toys.trainer(model, optimizer=optimizer, normaliser=samples)
    rows = toys.share(rank, model.axis.size, samples)
    found = []
    for _ in range(60):
        trainer.step([impl("trainer").MicroBatch(x[rows], y[rows], rows)])
        found.append(_residual(model, x, y))
    return found[0], found[-1]


def _residual(model: Any, x: Tensor, y: Tensor) -> float:
    (weight,) = model.full_values().values()
    return toys.loss(x @ weight.T, y).mean().item()
