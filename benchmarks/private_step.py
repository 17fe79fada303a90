"""S1 and S2: what a private step costs over a plain one, and deferred over immediate norms. On a CPU, one rank.

``python -m benchmarks private``: a network of B=8 sequences of T=64, blocks of two Linear layers of width 512 and 2048
with LayerNorms, float32, one thread; arms paired in one process. Printed ratios are "ours" over "peer" of a step, so
that 1.30 means that the private step takes 1.30 times as long.

Before any timing the arms have to give equal gradients bit for bit, on integers in float64 with nothing clipped, and to
be different code: the profile of each names the parts it ran.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from benchmarks.paired import paired
from fsdpcheck.impl.clipping.modes import parse
from fsdpcheck.impl.clipping.private_backward import Privacy
from fsdpcheck.impl.clipping.rules import Flat
from fsdpcheck.impl.costs.profile import Profile
from fsdpcheck.impl.sharding.collectives import ALONE
from fsdpcheck.impl.sharding.flat_model import ShardedModel
from fsdpcheck.impl.trainer import MicroBatch, Options, Trainer

SAMPLES, LENGTH, WIDTH, BLOCKS = 8, 64, 512, 3
MODES = ("ghost", "ghost_bk", "flash", "flash_bk")
GOALS = {"ghost_bk": "<= 1.30", "flash_bk": "<= 1.30"}


def lines() -> Iterator[str]:
    """One line a measurement. Raises RuntimeError if an arm is wrong or is not what it says."""
    _check_arms()
    plain = _step(_trainer(None, network(WIDTH, exact=False)))
    for mode in MODES:
        private = _step(_trainer(mode, network(WIDTH, exact=False)))
        # the ratio of paired() is peer over ours; plain is "ours", so that it reads private over plain
        yield _said("S1", f"{mode} over plain", plain, private, GOALS.get(mode, "none"))
    for mode in ("ghost", "ghost_bk"):
        deferred = _step(_trainer(mode, network(WIDTH, exact=False), deferred=True))
        immediate = _step(_trainer(mode, network(WIDTH, exact=False)))
        yield _said("S2", f"{mode}: deferred over immediate", immediate, deferred, "a map")


def _said(name: str, what: str, ours: Callable[[], None], peer: Callable[[], None], goal: str) -> str:
    found = paired(what, ours, peer, goal, clock=time.process_time)
    return f"{name} {what:<34} {found.ratio:5.2f}  [{found.low:.2f}, {found.high:.2f}]   goal {goal}"


def network(width: int, *, exact: bool) -> nn.Sequential:
    """``exact``: weights in {-1, 0, 1}, no LayerNorm, float64."""
    layers: list[nn.Module] = []
    for _ in range(BLOCKS):
        layers += [] if exact else [nn.LayerNorm(width)]
        layers += [nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)]
    module = nn.Sequential(*layers)
    if exact:
        generator = torch.Generator().manual_seed(0)
        module = module.double()
        for parameter in module.parameters():
            parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).double()
    return module


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the sum of squared errors of each sample."""
    return 0.5 * (outputs - targets).square().flatten(1).sum(1)


def _trainer(mode: str | None, module: nn.Module, *, deferred: bool = False, profile: Profile | None = None) -> Trainer:
    privacy = None
    if mode is not None:
        privacy = Privacy(Flat(2.0**60), parse(mode, "deferred" if deferred else "immediate"))
    model = ShardedModel(module, [], ALONE, reshard_after_forward=True)
    options = Options(SAMPLES, privacy=privacy)
    more = {} if profile is None else {"profile": profile}
    return Trainer(model, loss, lambda parameters: torch.optim.SGD(parameters, lr=2.0**-20), options, **more)


def _step(trainer: Trainer) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator)
    batch = [MicroBatch(x, torch.zeros_like(x), range(SAMPLES))]
    return lambda: trainer.step(batch)


def _check_arms() -> None:
    width, generator = 8, torch.Generator().manual_seed(2)
    x = torch.randint(-1, 2, (SAMPLES, 3, width), generator=generator).double()
    batch = [MicroBatch(x, torch.zeros_like(x), range(SAMPLES))]
    wanted: dict[str, Tensor] | None = None
    ran: dict[str | None, frozenset[str]] = {}
    for mode in (None, *MODES):
        profile = Profile()
        trainer = _trainer(mode, network(width, exact=True), profile=profile)
        trainer.step(batch)
        ran[mode] = frozenset(part for part, *_ in profile.table() if "/" not in part)
        gradients = trainer.model.full_gradients()
        wanted = wanted or gradients
        if any(not torch.equal(gradients[name], wanted[name]) for name in wanted):
            raise RuntimeError(f"{mode} gives other gradients than the plain step on exact data: run tests/impl")
    passes = {mode: "second backward" in parts for mode, parts in ran.items()}
    contracts = {mode: "weighted gradients" in parts for mode, parts in ran.items()}
    two, one = ({mode: mode in names for mode in ran} for names in (("ghost", "flash"), ("ghost_bk", "flash_bk")))
    if passes != two or contracts != one:
        raise RuntimeError(f"an arm ran other parts than its name says: {ran}")
