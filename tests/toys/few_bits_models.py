"""Models that few bits, or autocast, compute otherwise than float64, and ones of which that might be thought."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.toys.own_models import Calls, Net, batch, right

__all__ = ["batch", "right"]


def _added_in_place(x: Tensor) -> Tensor:
    """What was cast back is a copy in few bits alone: in the dtype of ``x`` it is ``wide`` itself."""
    wide = 2 * x.float()
    narrow = wide.to(x.dtype)
    narrow += 1
    return wide.to(x.dtype)


def _through_a_wide_product(x: Tensor) -> Tensor:
    """257 - 256 times x_i x_j, of which the product by name in float32 takes 9 bits: autocast rounds its factors."""
    wide = x.float()
    column, row = wide.unsqueeze(-1), wide.unsqueeze(-2)
    return ((257 * column) @ row - 256 * (column * row)).sum(-1).to(x.dtype)


def _masked(scores: Tensor, values: Tensor) -> Tensor:
    weights = torch.softmax(scores.float(), -1).to(values.dtype)
    return (weights @ values.unsqueeze(-1)).squeeze(-1)


def _mask_filled(x: Tensor) -> Tensor:
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    scores = x.unsqueeze(-1) * x.unsqueeze(-2)
    return _masked(scores.masked_fill(later, torch.finfo(x.dtype).min), x)


def _mask_added(x: Tensor) -> Tensor:
    lowest = torch.full((3, 3), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
    return _masked(x.unsqueeze(-1) * x.unsqueeze(-2) + lowest, x)


def _mask_multiplied(x: Tensor) -> Tensor:
    """As BERT writes it."""
    keep = torch.ones(3, 3, dtype=x.dtype).tril()
    return _masked(x.unsqueeze(-1) * x.unsqueeze(-2) + (1.0 - keep) * torch.finfo(x.dtype).min, x)


def mask_multiplied() -> nn.Module:
    return Net(Calls(_mask_multiplied))


def mask_filled() -> nn.Module:
    return Net(Calls(_mask_filled))


def mask_added() -> nn.Module:
    return Net(Calls(_mask_added))


class Added(nn.Module):
    """A buffer, which a policy leaves in float32: what it is added to is cast as it enters the next unit."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.eye(3)[:1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


def table() -> nn.Module:
    return Net(Added())


class WideWeight(nn.Module):
    """Takes a parameter in the dtype that it is given, and an input in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() @ self.weight).to(x.dtype)


def wide_weight() -> nn.Module:
    return Net(WideWeight())


def in_place() -> nn.Module:
    return Net(Calls(_added_in_place))


def wide_product() -> nn.Module:
    return Net(Calls(_through_a_wide_product))


def mask_of_many_bits() -> nn.Module:
    """No bfloat16 holds the number that masks."""
    return Net(Calls(_mask_of_many_bits))


def _mask_of_many_bits(x: Tensor) -> Tensor:
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    return _masked((x.unsqueeze(-1) * x.unsqueeze(-2)).masked_fill(later, -1e9), x)
