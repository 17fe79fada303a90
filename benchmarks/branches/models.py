"""Users' models with layers that no drawn model has, each small: what the reference's rules for them are reached by.

Each name below is a pair ``build``, ``batch`` for ``fsdpcheck run --model models.py:NAME --batch models.py:of_NAME``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WORDS, _WIDTH, _LENGTH = 7, 4, 3
Pair = tuple[Tensor, Tensor]


def _tokens(rows: int) -> Pair:
    return torch.randint(0, _WORDS, (rows, _LENGTH)), torch.randint(0, _WORDS, (rows,))


def _numbers(rows: int, *shape: int) -> Pair:
    return torch.randn(rows, *shape), torch.randint(0, _WORDS, (rows,))


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class _Attention(nn.Module):
    """Self-attention over tokens; ``options`` of the layer, ``given`` of its call."""

    def __init__(self, given: dict[str, object], **options: bool | int) -> None:
        super().__init__()
        self.embed, self.given = nn.Embedding(_WORDS, _WIDTH), given
        self.attention = nn.MultiheadAttention(_WIDTH, 2, batch_first=True, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mixed, _ = self.attention(x, x, x, **self.given)
        return self.head(mixed.sum(1))


def attention() -> nn.Module:
    """One packed matrix of queries, keys and values."""
    return _Attention({"need_weights": False})


def masked_attention() -> nn.Module:
    """A mask [T, T] for all samples, a matrix each for keys and values, biases of their own, a position of zeros."""
    mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)
    return _Attention({"attn_mask": mask}, kdim=_WIDTH, vdim=_WIDTH, add_bias_kv=True, add_zero_attn=True)


def causal_attention() -> nn.Module:
    """Causal, without biases, and its packed matrix frozen."""
    mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH)
    model = _Attention({"attn_mask": mask, "is_causal": True, "need_weights": False}, bias=False)
    model.attention.in_proj_weight.requires_grad_(False)
    return model


class _Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru, self.head = (
            nn.Embedding(_WORDS, _WIDTH),
            nn.GRU(_WIDTH, _WIDTH, batch_first=True),
            nn.Linear(_WIDTH, _WORDS),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0].sum(1))


def recurrent() -> nn.Module:
    """nn.GRU: no rule, and torch.func.vmap cannot run it."""
    return _Gru()


class _Gate(nn.Module):
    """Parameters of its own, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(_WIDTH)), nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * self.scale + y + self.shift


class _Gated(nn.Module):
    def __init__(self, below: nn.Module) -> None:
        super().__init__()
        self.below, self.gate, self.head = below, _Gate(), nn.Linear(_WIDTH, _WORDS)

    def forward(self, x: Tensor) -> Tensor:
        y = self.below(x)
        return self.head(self.gate(y, y * 2))


def gated() -> nn.Module:
    """A layer without a rule, of two inputs, between two Linear ones."""
    return _Gated(nn.Linear(_WIDTH, _WIDTH))


def frozen_bag() -> nn.Module:
    """Means of frozen rows."""
    return nn.Sequential(_frozen(nn.EmbeddingBag(_WORDS, _WIDTH, mode="mean")), nn.Linear(_WIDTH, _WORDS))


def bag_of_sums() -> nn.Module:
    """Sums of rows, and a norm without a weight."""
    norm = nn.RMSNorm(_WIDTH, elementwise_affine=False)
    return nn.Sequential(nn.EmbeddingBag(_WORDS, _WIDTH, mode="sum"), norm, nn.Linear(_WIDTH, _WORDS))


def frozen_rows() -> nn.Module:
    """Embeddings that are not trained, below a norm that is not."""
    return nn.Sequential(
        _frozen(nn.Embedding(_WORDS, _WIDTH)),
        _frozen(nn.RMSNorm(_WIDTH)),
        nn.Flatten(),
        nn.Linear(_LENGTH * _WIDTH, _WORDS),
    )


def convolved() -> nn.Module:
    """Convolutions padded as wide as their input, and not at all."""
    return nn.Sequential(
        nn.Conv1d(1, 2, 2, padding="same"),
        nn.Conv1d(2, 2, 2, padding="valid"),
        nn.Flatten(),
        nn.Linear(2 * (_WIDTH - 1), _WORDS),
    )


def of_tokens(rows: int) -> Pair:
    """[n, T] tokens, [n] classes."""
    return _tokens(rows)


def of_rows(rows: int) -> Pair:
    """[n, d] numbers, [n] classes."""
    return _numbers(rows, _WIDTH)


def of_lines(rows: int) -> Pair:
    """[n, 1, d] numbers, [n] classes."""
    return _numbers(rows, 1, _WIDTH)
