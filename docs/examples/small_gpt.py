"""A small GPT of ordinary modules, and a batch: what `fsdpcheck run --model ... --batch ...` is tried on.

$ fsdpcheck run --model docs/examples/small_gpt.py:build --batch docs/examples/small_gpt.py:batch
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, CONTEXT = 16, 4


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [b, T, d]; b may be 0
        b, length, width = x.shape
        split = (b, length, self.heads, width // self.heads)
        query, key, value = (part.reshape(split).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(b, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, heads: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [b, T] -> [b, T, V]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    return GPT()


def tied() -> nn.Module:
    return GPT(tied=True)


def batch(n: int) -> tuple[Tensor, Tensor]:
    """n samples: tokens [n, T], and the tokens that follow them [n, T]."""
    tokens = torch.randint(VOCABULARY, (n, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]
