"""EmbeddingBag: y_i = sum of the rows of sample i's tokens, or their mean; the bag is the sample, tokens [B, T].

With c_ik the number of times that token k is in bag i, row k of sample i's gradient is c_ik g_i ("sum") or
c_ik g_i / n_i ("mean", n_i the tokens of the bag). All rows are multiples of one vector, so the squared norm is
|g_i|^2 * sum_k c_ik^2: no row is formed. ``padding_idx`` is in no bag and does not count in n_i.

Tokens given as one list with offsets are refused: there the sample axis is not the input's first, so activations and
backprops do not belong to each other row by row. Tokens with weights of their own (``per_sample_weights``) are too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import _terms, embedding

LAYER = nn.EmbeddingBag
ONE_INPUT = "tokens [B, T], one bag a row; with offsets rows are no samples, and tokens have no weights of their own"


def refusal(module: nn.EmbeddingBag) -> str:
    """Options under which a sample's gradient is not linear in counts, or not a function of that sample alone."""
    if module.mode == "max":
        return 'mode "max" picks single entries of rows; "sum" and "mean" are covered'
    if module.max_norm is not None:
        return "max_norm changes the weight during forward"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq divides by counts over the whole batch"
    return "sparse gradients cannot be sharded flat" if module.sparse else ""


def squared_norm(module: nn.EmbeddingBag, activations: Tensor, backprops: Tensor) -> Tensor:
    """[B]: squared gradient norms; ``activations`` are tokens, integers [B, T], ``backprops`` [B, p]."""
    if not module.weight.requires_grad:
        return backprops.new_zeros(len(backprops))
    g_Bp = by_mode(module, activations, backprops)
    return g_Bp.square().sum(1) * squared_counts(module, activations).to(g_Bp.dtype)


def per_sample_gradient(module: nn.EmbeddingBag, activations: Tensor, backprops: Tensor) -> dict[str, Tensor]:
    """{"weight": [B, vocabulary, p]} if it is trainable."""
    if not module.weight.requires_grad:
        return {}
    return {"weight": embedding.rows_by_sample(*_spread(module, activations, backprops), module.num_embeddings)}


def weighted_gradient(
    module: nn.EmbeddingBag, activations: Tensor, backprops: Tensor, weights_B: Tensor
) -> dict[str, Tensor]:
    """{"weight": [vocabulary, p]} if it is trainable."""
    if not module.weight.requires_grad:
        return {}
    scaled = _terms.scaled(backprops, weights_B)
    return {"weight": embedding.rows_of_all(*_spread(module, activations, scaled), module.num_embeddings)}


def by_mode(module: nn.EmbeddingBag, tokens_BT: Tensor, g_Bp: Tensor) -> Tensor:
    """[B, p]: what one token of a bag gets of its backprop: all of it, or a share of 1 / n_i."""
    if module.mode != "mean":
        return g_Bp
    return g_Bp / counted(module, tokens_BT).sum(1, keepdim=True).clamp(min=1).to(g_Bp.dtype)


def counted(module: nn.EmbeddingBag, tokens_BT: Tensor) -> Tensor:
    """[B, T]: whether a position holds a token that is in the bag, as 0 or 1 in the tokens' dtype."""
    if module.padding_idx is None:
        return torch.ones_like(tokens_BT)
    return (tokens_BT != module.padding_idx).to(tokens_BT.dtype)


def squared_counts(module: nn.EmbeddingBag, tokens_BT: Tensor) -> Tensor:
    """[B], integers: sum over the distinct tokens of each bag of the square of how often it occurs."""
    pairs, place = embedding.pair_of_each_position(tokens_BT, module.num_embeddings)
    counts = tokens_BT.new_zeros(len(pairs)).index_add_(0, place, counted(module, tokens_BT).flatten())
    return tokens_BT.new_zeros(len(tokens_BT)).index_add_(0, pairs // module.num_embeddings, counts.square())


def _spread(module: nn.EmbeddingBag, tokens_BT: Tensor, g_Bp: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and what each position adds to its token's row, [B, T, p]."""
    share_B1p = by_mode(module, tokens_BT, g_Bp).unsqueeze(1)
    return tokens_BT, share_B1p * counted(module, tokens_BT).unsqueeze(2).to(g_Bp.dtype)
