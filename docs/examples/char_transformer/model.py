"""A transformer over characters, and a text."""

import torch
import torch.nn.functional as F
from torch import nn

TEXT = "the quick brown fox jumps over the lazy dog; " * 40
CHARACTERS = sorted(set(TEXT))
VOCABULARY = len(CHARACTERS)
CONTEXT = 16


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):  # [b, T, d]
        b, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, dim=2)
        query, key, value = (part.reshape(b, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, length, width))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    def __init__(self, width=32, depth=2, heads=4, characters=VOCABULARY, context=CONTEXT):
        super().__init__()
        self.token, self.position = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens):  # [b, T] -> [b, T, V]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step, of, rank, ranks):
    """This rank's rows of a batch of ``of``: (tokens, the characters that follow them), [b, T] each."""
    known = torch.tensor([CHARACTERS.index(character) for character in TEXT])
    starts = torch.randint(0, len(known) - CONTEXT - 1, (of,), generator=torch.Generator().manual_seed(step))
    rows = torch.stack([known[start : start + CONTEXT + 1] for start in starts[rank::ranks]])
    return rows[:, :-1], rows[:, 1:]
