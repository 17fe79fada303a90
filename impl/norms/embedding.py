"""Embedding: row k of sample i's gradient is the sum of g_t over the positions t whose token is k.

The rows of one token are added *before* squaring, so a token that occurs twice counts with its cross term; the row of
``padding_idx`` has no gradient.

Source: Li et al. 2021, arXiv:2110.05679, appendix F.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _terms

LAYER = nn.Embedding


def refusal(module: nn.Embedding) -> str:
    """Options under which a sample's gradient is not a function of that sample alone, or is not dense."""
    if module.max_norm is not None:
        return "max_norm changes the weight during forward"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts over the whole batch"
    return "sparse gradients cannot be sharded flat" if module.sparse else ""


def squared_norm(module: nn.Embedding, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms; ``activations`` are tokens, int64 [B] or [B, ...], ``backprops`` [B, ..., p].

    Memory is one row for each distinct (sample, token), never B times the vocabulary.
    """
    if not module.weight.requires_grad:
        return backprops.new_zeros(len(backprops))
    return rows_squared_norm(*as_pair(module, activations, backprops), module.num_embeddings)


def rows_squared_norm(tokens_BT: Tensor, g_BTp: Tensor, rows: int) -> Tensor:
    """[B]: rows of equal tokens of a sample are added, then squared."""
    pairs, place = pair_of_each_position(tokens_BT, rows)
    sums = g_BTp.new_zeros(len(pairs), g_BTp.shape[2]).index_add_(0, place, g_BTp.flatten(0, 1))
    return g_BTp.new_zeros(len(g_BTp)).index_add_(0, pairs // rows, sums.square().sum(1))


def per_sample_gradient(module: nn.Embedding, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, vocabulary, p]} if it is trainable."""
    if not module.weight.requires_grad:
        return {}
    return {"weight": rows_by_sample(*as_pair(module, activations, backprops), module.num_embeddings)}


def weighted_gradient(
    module: nn.Embedding, activations: Tensor, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{"weight": [vocabulary, p]} if it is trainable."""
    if not module.weight.requires_grad:
        return {}
    scaled = _terms.scaled(backprops, weights_B)
    return {"weight": rows_of_all(*as_pair(module, activations, scaled), module.num_embeddings)}


def rows_by_sample(tokens_BT: Tensor, g_BTp: Tensor, rows: int) -> Tensor:
    """[B, rows, p]: for each sample, what its positions give to each row of the weight."""
    flat = g_BTp.new_zeros(len(tokens_BT) * rows, g_BTp.shape[2])
    flat.index_add_(0, pair_number(tokens_BT, rows), g_BTp.flatten(0, 1))
    return flat.view(len(tokens_BT), rows, g_BTp.shape[2])


def rows_of_all(tokens_BT: Tensor, g_BTp: Tensor, rows: int) -> Tensor:
    """[rows, p]: what all positions of all samples give to each row of the weight."""
    whole = g_BTp.new_zeros(rows, g_BTp.shape[2])
    return whole.index_add_(0, tokens_BT.flatten(), g_BTp.flatten(0, 1))


def pair_of_each_position(tokens_BT: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The distinct (sample, token) pairs as numbers sample * rows + token, and for each position which one it is."""
    pairs, place = torch.unique(pair_number(tokens_BT, rows), return_inverse=True)
    return pairs, place


def without_padding(module: nn.Embedding, tokens_BT: Tensor, g_BTp: Tensor) -> Tensor:
    """Backprops with zeros where the token is ``padding_idx``."""
    if module.padding_idx is None:
        return g_BTp
    return g_BTp.masked_fill((tokens_BT == module.padding_idx).unsqueeze(-1), 0)


def pair_number(tokens_BT: Tensor, rows: int) -> Tensor:
    """[B * T]: sample * rows + token of every position."""
    samples = torch.arange(len(tokens_BT), device=tokens_BT.device).unsqueeze(1)
    return (samples * rows + tokens_BT).flatten()


def as_pair(module: nn.Embedding, activations: Tensor, backprops: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, T], and backprops [B, T, p] with zeros at padding."""
    positions = activations.shape[1:].numel()
    tokens_BT = activations.reshape(activations.shape[0], positions)
    g_BTp = backprops.reshape(activations.shape[0], positions, backprops.shape[-1])
    return tokens_BT, without_padding(module, tokens_BT, g_BTp)
