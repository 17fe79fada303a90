"""Scripts that are observed on simulated ranks, and what their whole tensors are."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdpcheck.comparison.observation import whole
from fsdpcheck.comparison.observation.observer import Observer
from fsdpcheck.comparison.observation.script import ObservedScript
from fsdpcheck.comparison.record import Key, Observation
from fsdpcheck.simulation.programs import script
from fsdpcheck.simulation.simulate import Options, simulate_script

NET = """
    import torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    dist.init_process_group("gloo")
    W, rank = dist.get_world_size(), dist.get_rank()
    torch.set_default_dtype(torch.float64)

    def whole_numbers(*shape):
        return torch.arange(1, 1 + torch.Size(shape).numel()).remainder(7).sub(3).double().reshape(shape)

    class Net(nn.Module):
        def __init__(self, inner=5, last=2):
            super().__init__()
            self.one, self.two = nn.Linear(3, inner), nn.Linear(inner, last, bias=False)
            for parameter in self.parameters():
                parameter.data = whole_numbers(*parameter.shape)

        def forward(self, x):
            return self.two(self.one(x))

    BATCH = 12
    x, y = whole_numbers(BATCH, 3), whole_numbers(BATCH, 2)

    def train(model, optimizer, steps=2, divide=BATCH):
        here = slice(rank * BATCH // W, (rank + 1) * BATCH // W)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x[here]) - y[here]).sum() * W
            loss.backward()
            optimizer.step()
"""
"""Of whole numbers, so that every sum of them is exact: a loss whose mean over ranks is that of one rank."""


@dataclass
class Observed:
    """What was observed of a script, and its whole tensors."""

    observation: Observation
    whole: whole.Assembled

    def values(self, kind: str, step: int = 0) -> dict[str, torch.Tensor]:
        """By name."""
        return {key.name: value for key, value in self.whole.values.items() if (key.kind, key.step) == (kind, step)}

    def value(self, kind: str, name: str, step: int = 0) -> torch.Tensor:
        return self.whole.values[Key(step, kind, name)]

    @property
    def notes(self) -> list[str]:
        return sorted({note for record in self.observation.ranks for note in record.notes})


def observe(
    folder: Path, source: str, size: int, *arguments: str, options: Options | None = None, parts: bool = False
) -> Observed:
    """Run a script, the lines of ``source`` after those of NET, on so many ranks."""
    path = folder / "train.py"
    path.write_text(textwrap.dedent(NET) + textwrap.dedent(source))
    observer = Observer(parts=parts)
    with observer.installed():
        observed = ObservedScript(script.of_file(path, arguments), observer)
        done = simulate_script(observed, size, options or Options(show=False)).check()
    ranks = tuple(observer.records[rank] for rank in range(size))
    observation = Observation(size, ranks, done.traces, done.failure, done.printed)
    return Observed(observation, whole.assembled(observation))


def same(one: Observed, other: Observed, kind: str, step: int = 0) -> list[str]:
    """Names of this kind, all of which have the same bits in both. Raises AssertionError otherwise."""
    mine, theirs = one.values(kind, step), other.values(kind, step)
    assert set(mine) == set(theirs), f"{kind}: {sorted({*mine} ^ {*theirs})}; gaps {other.whole.gaps}"
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), f"{kind} of {name}: {value} and {theirs[name]}"
    return list(mine)


def line_of(source: str, text: str) -> str:
    """The first line of a script that contains ``text``, as observables have it."""
    lines = (textwrap.dedent(NET) + textwrap.dedent(source)).splitlines()
    first = len(textwrap.dedent(NET).splitlines())
    return f"train.py:{next(number for number, line in enumerate(lines, 1) if number > first and text in line)}"
