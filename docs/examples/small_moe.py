"""A small mixture of experts: each token goes to one of four, and an expert that no token chooses is not run.

$ fsdpcheck run --model docs/examples/small_moe.py:build --batch docs/examples/small_moe.py:batch
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, CONTEXT = 16, 4


class Experts(nn.Module):
    """One parameter holds all experts, so that it has a gradient on every rank: zeros for those that are not run."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / (2 * width) ** 0.5)

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:  # [n, d], [n] -> [n, d]
        mixed = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist() or [0]:  # a rank without samples has gradients too, of zeros
            (rows,) = torch.where(chosen == expert)
            hidden = F.gelu(F.linear(tokens[rows], self.up[expert]))
            mixed = mixed.index_add(0, rows, F.linear(hidden, self.down[expert]))
        return mixed


class Block(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:  # [b, T, d]; b may be 0
        tokens = self.norm(x).flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(1, dim=-1)
        return x + (share * self.experts(tokens, chosen.squeeze(-1))).reshape(x.shape)


class MixtureOfExperts(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, experts: int = 4) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:  # [b, T] -> [b, T, V]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]).expand_as(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> nn.Module:
    return MixtureOfExperts()


def batch(n: int) -> tuple[Tensor, Tensor]:
    """n samples: tokens [n, T], and the tokens that follow them [n, T]."""
    tokens = torch.randint(VOCABULARY, (n, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]
