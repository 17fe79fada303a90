"""Models of a user's own that turn pairs of features, as rotary embeddings do, in each way to write that."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.toys.own_models import Net
from tests.toys.own_models import batch as batch


class Turning(Net):
    """Its blocks stand in a dict, and it turns pairs of features by complex numbers of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(n): nn.Sequential(nn.Linear(4, 4)) for n in range(2)})  # type: ignore[assignment]
        self.head = nn.Linear(4, 2, bias=False)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, x[:, :1]], 1)
        x = self.turned(torch.view_as_complex(x.reshape(-1, 2, 2))).flatten(1)
        for block in self.blocks.values():  # type: ignore[operator]
            x = block(x)
        result: Tensor = self.head(x)
        return result

    def turned(self, pairs: Tensor) -> Tensor:
        return torch.view_as_real(pairs * self.get_buffer("turns"))


class TurningBack(Turning):
    """Computes with complex numbers, and not by products alone."""

    def turned(self, pairs: Tensor) -> Tensor:
        return torch.view_as_real(pairs + self.get_buffer("turns"))


class TurningByAngles(Turning):
    """Makes its turns in forward."""

    def turned(self, pairs: Tensor) -> Tensor:
        angles = torch.outer(torch.ones(1, dtype=pairs.real.dtype), torch.tensor([0.5, 1.0], dtype=pairs.real.dtype))
        return torch.view_as_real(torch.polar(torch.ones_like(angles), angles) * pairs)


class TurningByTables(Turning):
    """Has its cosines and sines in two tables."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(3.0), torch.tensor([1.0, 2.0]))
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def turned(self, pairs: Tensor) -> Tensor:
        one, two = torch.view_as_real(pairs).unbind(-1)
        cosines, sines = self.get_buffer("cosines")[2], self.get_buffer("sines")[2]
        return torch.stack([one * cosines - two * sines, one * sines + two * cosines], -1)


def turning() -> nn.Module:
    return Turning()


def turning_by_one_for_two() -> nn.Module:
    """Its blocks have the buffer of the model, too."""
    model = Turning()
    model.blocks["1"].register_buffer("turns", model.get_buffer("turns"))  # type: ignore[index,union-attr]
    return model


def turning_back() -> nn.Module:
    return TurningBack()


def turning_by_angles() -> nn.Module:
    return TurningByAngles()


def turning_by_tables() -> nn.Module:
    return TurningByTables()
