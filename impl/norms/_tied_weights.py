"""One weight used several times in a forward: the squared norm of the *sum* of its uses' gradients, by ghost forms.

Uses by Linear layers are one Linear whose positions are those of all uses end to end, sum_t g_t a_t^T; so are uses by
Embeddings. With L the gradient of the Linear uses and E that of the Embedding uses,

    |L + E|^2 = |L|^2 + |E|^2 + 2 <L, E>,    <L, E> = sum_{t, s} g_t[token_s] <a_t, e_s>

where g, a belong to position t of the Linear uses and token, e = backprop to position s of the Embedding uses. Adding
|L|^2 + |E|^2 alone would be too small by up to a factor 2, and the sensitivity of a sample's update too large.

Legend: B samples, T and S positions, d input features, p output features; a Linear's p is an Embedding's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from . import embedding, linear

Pair = tuple[Tensor, Tensor]
"""(activations, backprops) of a use: [B, T, d] and [B, T, p], or tokens [B, S] and [B, S, d]."""


def squared_norm(uses: Sequence[tuple[nn.Module, Tensor, Tensor]]) -> Tensor:
    """[B], never below zero, of (module, activations, backprops) of each use, at least one.

    The modules are Linear or Embedding layers that hold one and the same weight.
    """
    linears = [linear.as_pair(a, g) for module, a, g in uses if not isinstance(module, nn.Embedding)]
    embeddings = [embedding.as_pair(module, a, g) for module, a, g in uses if isinstance(module, nn.Embedding)]
    total_B = torch.zeros((), dtype=uses[0][2].dtype, device=uses[0][2].device)
    if linears:
        total_B = total_B + linear.weight_squared_norm(*_end_to_end(linears))
    if embeddings:
        rows = next(module.num_embeddings for module, *_ in uses if isinstance(module, nn.Embedding))
        total_B = total_B + embedding.rows_squared_norm(*_end_to_end(embeddings), rows)
    if linears and embeddings:
        total_B = (total_B + 2 * cross(_end_to_end(linears), _end_to_end(embeddings))).clamp(min=0)
    return total_B


def cross(one: Pair, other: Pair) -> Tensor:
    """[B]: <L, E> of Linear uses ([B, T, d], [B, T, p]) and Embedding uses (tokens [B, S], [B, S, d])."""
    (a_BTd, g_BTp), (tokens_BS, e_BSd) = one, other
    picked_BTS = g_BTp.gather(2, tokens_BS.long().unsqueeze(1).expand(-1, g_BTp.shape[1], -1))
    return (picked_BTS * (a_BTd @ e_BSd.transpose(1, 2))).sum((1, 2))


def _end_to_end(pairs: Sequence[Pair]) -> Pair:
    """One use that has the positions of all."""
    return torch.cat([a for a, _ in pairs], 1), torch.cat([g for _, g in pairs], 1)
