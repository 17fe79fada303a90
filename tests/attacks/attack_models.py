"""Models of a user: some that an implementation must not be blamed for, some that are odd and honest."""

from __future__ import annotations

import os
import sys
import warnings

import torch
from torch import Tensor, nn

if os.environ.get("ATTACK_IMPORT"):
    # The attack "import_side_effects": what a careless training script does when it is imported.
    print("importing the model", flush=True)
    os.makedirs("elsewhere", exist_ok=True)
    os.chdir("elsewhere")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    warnings.simplefilter("error")
    sys.argv[:] = ["train.py"]


def batch(n: int = 27) -> tuple[Tensor, Tensor]:
    """n samples of whole numbers."""
    inputs = torch.arange(n * 4, dtype=torch.get_default_dtype()).reshape(n, 4) % 5 - 2
    return inputs, (torch.arange(n * 2, dtype=torch.get_default_dtype()).reshape(n, 2) % 3 - 1)


class Stack(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:-1]:
            x = torch.relu(block(x))
        out: Tensor = self.blocks[-1](x)
        return out


class Counts(Stack):
    """Every third forward doubles what it returns: the model changes itself."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counts.calls += 1
        return super().forward(x) * (2 if Counts.calls % 3 == 0 else 1)


class SizeMatters(Stack):
    """Divides by the number of samples in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / max(1, x.shape[0])


class Rolls(Stack):
    """Adds a random whole number that no mode switches off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randint(0, 2, (), device=x.device))


class Casts(Stack):
    """Goes through float64 and back, through a view as bytes, and through a numpy-free detour of shapes."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        return super().forward(x.double().to(dtype).t().contiguous().t()).double().to(dtype)


SHARED = Stack()


def counts() -> nn.Module:
    return Counts()


def size_matters() -> nn.Module:
    return SizeMatters()


def rolls() -> nn.Module:
    return Rolls()


def casts() -> nn.Module:
    return Casts()


def shared() -> nn.Module:
    """The same module every time, so that who trains it trains it for everybody."""
    return SHARED


def stack() -> nn.Module:
    return Stack()
