"""A small ViT: a convolution that cuts images into patches, a class token, blocks of attention, an MLP with GELU.

$ fsdpcheck run --model docs/examples/small_vit.py:build --batch docs/examples/small_vit.py:batch
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SIZE, PATCH = 4, 4, 2


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:  # [b, T, d]; b may be 0
        query, key, value = (
            layer(x).unflatten(-1, (layer.out_features // self.size, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, PATCH, stride=PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (SIZE // PATCH) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:  # [b, 1, S, S] -> [b, C]
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def build() -> nn.Module:
    return ViT()


def batch(n: int) -> tuple[Tensor, Tensor]:
    """n samples: images [n, 1, S, S], and their classes [n]."""
    return torch.randn(n, 1, SIZE, SIZE), torch.randint(CLASSES, (n,))
