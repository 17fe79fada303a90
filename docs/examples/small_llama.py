"""A small Llama of modules spelled out in place: RMSNorm in float32, rotary embeddings, grouped queries, a gated MLP.

$ fsdpcheck run --model docs/examples/small_llama.py:build --batch docs/examples/small_llama.py:batch
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, CONTEXT = 16, 4


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, size: int, base: float = 10000.0) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [b, H, T, E]
        angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), self.frequencies.float())
        cos, sin = (part.repeat(1, 2).to(x.dtype) for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * self.size, bias=False)
        self.value = nn.Linear(width, groups * self.size, bias=False)
        self.rotary = Rotary(self.size)

    def forward(self, x: Tensor) -> Tensor:  # [b, T, d]; b may be 0
        query, key, value = (
            layer(x).unflatten(-1, (layer.out_features // self.size, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = self.rotary(query), self.rotary(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.mlp = Attention(width, heads, groups), GatedMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, heads: int = 2, groups: int = 1) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, groups) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [b, T] -> [b, T, V]
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build() -> nn.Module:
    return Llama()


def batch(n: int) -> tuple[Tensor, Tensor]:
    """n samples: tokens [n, T], and the tokens that follow them [n, T]."""
    tokens = torch.randint(VOCABULARY, (n, CONTEXT + 1))
    return tokens[:, :-1], tokens[:, 1:]
