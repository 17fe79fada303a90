"""Planted bugs of per-sample norms: their aggregation over ranks, and the rules of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..clipping import norm_aggregation
from ..norms import embedding
from ..sharding import collectives
from ..sharding.collectives import Axis
from ._fault import Function, Hit, fault


def _by_position(squared: torch.Tensor, axis: Axis, add: Function) -> Any:
    """``squared`` [..., b] added up over ranks of unequal b, each as long as its own."""
    own, counts = squared.shape[-1], torch.empty(axis.size, dtype=torch.int64)
    collectives.all_gather(norm_aggregation.INDICES, counts, torch.tensor([own]), axis)
    padded = torch.nn.functional.pad(squared, (0, int(counts.max()) - own))
    return add(padded, axis)[..., :own]


# -- aggregation over ranks: the table of clipping/norm_aggregation.py ----------------------------------------------


@fault(
    "clipping.norm_aggregation:squared_norms",
    "complete norms reduced once more, https://github.com/modelscope/twinkle/pull/290",
    "norms.replicated-complete",
    cause=r"exactly sqrt\([WS]\) = |complete on every rank are counted [WS] = ",
)
def complete_norms_summed(original: Function, hit: Hit) -> Function:
    """Replicated batch: squared norms that are complete on every rank are summed over the ranks."""

    def planted(terms: norm_aggregation.Terms, layout: norm_aggregation.Layout, axis: Axis) -> Any:
        squared = original(terms, layout, axis)
        if layout == "distributed":
            return squared
        hit()
        return norm_aggregation.sum_over(squared, axis)

    return planted


@fault(
    "clipping.norm_aggregation:squared_norms",
    "tensor-parallel norm code used under FSDP, https://github.com/meta-pytorch/opacus/pull/761",
    "norms.distributed-complete",
    cause="by position",
)
def norms_summed_by_position(original: Function, hit: Hit) -> Function:
    """Distributed batch: squared norms of different samples at the same local position are summed over the ranks."""

    def planted(terms: norm_aggregation.Terms, layout: norm_aggregation.Layout, axis: Axis) -> Any:
        squared = original(terms, layout, axis)
        if layout == "replicated":
            return squared
        hit()
        return _by_position(squared, axis, norm_aggregation.sum_over)

    return planted


@fault(
    "clipping.norm_aggregation:sum_over",
    "own shard's norm taken for the whole, https://github.com/pytorch/pytorch/issues/72548",
    "norms.replicated-partial",
    cause="own shard of rank",
)
def partial_norms_not_summed(original: Function, hit: Hit) -> Function:
    """Each rank takes the squared norm of its own shard for the sample's whole squared norm."""

    def planted(partial: torch.Tensor, axis: Axis) -> Any:
        hit()
        return partial

    return planted


@fault(
    "clipping.norm_aggregation:sum_over",
    "norms of shards summed over replicas too, https://github.com/ByteDance-Seed/VeOmni/issues/184",
    "norms.one-axis",
    cause="by position",
)
def partial_norms_summed_over_the_world(original: Function, hit: Hit) -> Function:
    """Partial terms are summed over all ranks, also where other replicas have other samples."""

    def planted(partial: torch.Tensor, axis: Axis) -> Any:
        world = collectives.axis()
        if world.size > axis.size:
            hit()
        return _by_position(partial, world, original)

    return planted


@fault(
    "clipping.norm_aggregation:refuse_impossible",
    "no check of the layout, row 5 of the table of impl/clipping/norm_aggregation.py",
    "norms.refused",
    cause="partial contributions are taken although the samples are split",
)
def impossible_norms_summed(original: Function, hit: Hit) -> Function:
    """Partial terms of a distributed batch are not refused."""

    def planted(layout: norm_aggregation.Layout, contributions: Sequence[norm_aggregation.Contribution]) -> None:
        if layout == "distributed" and "partial" in contributions:
            hit()

    return planted


@fault(
    "clipping.norm_aggregation:squared_norms",
    "one flag for a group of sharded and replicated parameters, https://github.com/deepspeedai/DeepSpeed/pull/5411",
    "norms.mixed",
    cause=r"\(root\) that are complete on every rank are counted [WS] = ",
)
def complete_terms_counted_by_every_rank(original: Function, hit: Hit) -> Function:
    """Mixed contributions: the complete terms go into the all-reduce together with the partial ones."""

    def planted(terms: norm_aggregation.Terms, layout: norm_aggregation.Layout, axis: Axis) -> Any:
        if terms.partial is None:
            return original(terms, layout, axis)
        hit()
        return norm_aggregation.sum_over(terms.complete + terms.partial, axis)

    return planted


@fault(
    "clipping.norm_aggregation:in_dataset_order",
    "missing reorder after the gather, claim A3 of the claims ledger",
    "norms.dataset-order",
    cause="order of the ranks",
)
def gathered_norms_left_in_rank_order(original: Function, hit: Hit) -> Function:
    """Norms gathered from all ranks are reported in the order of the ranks, not by sample index."""

    def planted(indices: torch.Tensor, values: torch.Tensor) -> Any:
        hit()
        ordered = original(indices, values)
        return norm_aggregation.InDatasetOrder(ordered.indices, values, ordered.duplicates)

    return planted


@fault(
    "sharding.flat_buffer:FlatBuffer.owned",
    "bounded at its start but not its end, https://github.com/NVIDIA/Megatron-LM/pull/5898",
    "norms.replicated-partial",
    cause="last element of each",
)
def owned_part_off_by_one(original: Function, hit: Hit) -> Function:
    """Partial norms: the last element of every shard is left out."""

    def planted(self: Any, position: int) -> slice:
        part: slice = original(self, position)
        hit()
        return slice(part.start, max(part.start, part.stop - 1))

    return planted


@fault(
    "clipping.recorder:term",
    "squared norms cast down, https://github.com/facebookresearch/fairscale/issues/1092",
    "clipping.norms",
    cause="bfloat16",
)
def squared_norms_cast_down(original: Function, hit: Hit) -> Function:
    """Each layer's squared norms pass through bfloat16 (8 bits) before they are added up."""

    def planted(*arguments: Any) -> Any:
        hit()
        found = original(*arguments)
        return {kind: squared.to(torch.bfloat16).to(squared.dtype) for kind, squared in found.items()}

    return planted


# -- norm rules -------------------------------------------------------------------------------------------------------


@fault(
    "norms.linear:bias_squared_norm",
    "a parameter forgotten by a norm rule",
    "clipping.norms",
    cause=r"(linear|attention)\S*\.bias .*left out of the norm",
)
def bias_left_out_of_norm(original: Function, hit: Hit) -> Function:
    """Linear: the bias is clipped but does not count in the norm."""

    def planted(g_BTp: torch.Tensor) -> Any:
        hit()
        return g_BTp.new_zeros(len(g_BTp))

    return planted


@fault(
    "norms.linear:bias_squared_norm",
    "ghost norm of the bias for 3-D inputs, https://github.com/meta-pytorch/opacus/pull/751",
    "clipping.norms",
    cause="bias.*entries of the Gram",
)
def bias_gram_entries_squared(original: Function, hit: Hit) -> Function:
    """Linear: the bias norm sums the squares of the Gram matrix's entries instead of the entries."""

    def planted(g_BTp: torch.Tensor) -> Any:
        hit()
        return (g_BTp @ g_BTp.transpose(1, 2)).square().sum((1, 2))

    return planted


@fault(
    "norms.linear:direct",
    "split-K: partial sums squared before they are added up",
    "clipping.norms",
    cause="two halves",
)
def partial_sums_squared(original: Function, hit: Hit) -> Function:
    """Linear, direct form: the two halves of a sequence are squared apart."""

    def planted(a_BTd: torch.Tensor, g_BTp: torch.Tensor) -> Any:
        hit()
        half = a_BTd.shape[1] // 2
        return original(a_BTd[:, :half], g_BTp[:, :half]) + original(a_BTd[:, half:], g_BTp[:, half:])

    return planted


@fault(
    "norms.linear:gram",
    "only equal positions compared: tokens taken for samples, https://github.com/meta-pytorch/opacus/pull/722",
    "*norms*",
    cause="without their cross terms",
)
def gram_without_cross_terms(original: Function, hit: Hit) -> Function:
    """Linear, Gram form: only the diagonal of the two Gram matrices is used."""

    def planted(a_BTd: torch.Tensor, g_BTp: torch.Tensor) -> Any:
        hit()
        return (a_BTd.square().sum(2) * g_BTp.square().sum(2)).sum(1)

    return planted


@fault(
    "norms.linear:squared_norm",
    "frozen and trainable of one layer mixed up, https://github.com/meta-pytorch/opacus/issues/436",
    "clipping.norms",
    cause="frozen weight counts",
)
def frozen_weight_counted(original: Function, hit: Hit) -> Function:
    """Linear: a frozen weight with a trainable bias counts in the norm."""

    def planted(module: Any, activations: torch.Tensor, backprops: torch.Tensor) -> Any:
        squared = original(module, activations, backprops)
        if module.weight.requires_grad:
            return squared
        hit()
        per_sample = torch.einsum("b...p,b...d->bpd", backprops, activations)
        return squared + per_sample.square().sum((1, 2))

    return planted


@fault(
    "clipping.recorder:Recorder._summed",
    "layers' norms added, not their squares",
    "norms.additive",
    cause="norms of parameters are added",
)
def norms_of_layers_added(original: Function, hit: Hit) -> Function:
    """A sample's norm is the sum of its layers' norms: never too small, so it clips too much."""

    def planted(self: Any, squares: Sequence[Any], losses: torch.Tensor) -> Any:
        found = original(self, squares, losses)
        if self.clipping.groups is not None or found.partial is not None or len(squares) < 2:
            return found
        hit()
        norms = torch.stack([term for own in squares for term in own.values()]).sqrt()
        return norm_aggregation.Terms(norms.sum(0).square())

    return planted


@fault(
    "norms.embedding:pair_of_each_position",
    "per-token norms added, cross terms lost, https://github.com/meta-pytorch/opacus/pull/738",
    "clipping.norms",
    cause="occurs twice in a sample",
)
def embedding_rows_not_merged(original: Function, hit: Hit) -> Function:
    """Embedding: a token that occurs twice in a sample counts as two rows."""

    def planted(tokens_BT: torch.Tensor, rows: int) -> Any:
        hit()
        numbers = embedding.pair_number(tokens_BT, rows)
        return numbers, torch.arange(len(numbers), device=numbers.device)

    return planted


@fault(
    "norms.embedding:without_padding",
    "padding tokens counted, https://github.com/meta-pytorch/opacus/issues/792",
    "clipping.norms",
    cause="row of padding_idx",
)
def padding_row_counted(original: Function, hit: Hit) -> Function:
    """Embedding: the row of padding_idx, which has no gradient, counts in the norm."""

    def planted(module: Any, tokens_BT: torch.Tensor, g_BTp: torch.Tensor) -> Any:
        hit()
        return g_BTp

    return planted


@fault(
    "norms.layer_norm:per_sample_gradient",
    "a parameter forgotten by a norm rule",
    "clipping.norms",
    cause=r"layer_norm.*\.bias .*left out of the norm",
)
def layer_norm_bias_left_out(original: Function, hit: Hit) -> Function:
    """LayerNorm: the bias is clipped but does not count in the norm."""

    def planted(module: Any, activations: torch.Tensor, backprops: torch.Tensor) -> Any:
        hit()
        gradients = original(module, activations, backprops)
        return {name: gradient * (name != "bias") for name, gradient in gradients.items()}

    return planted


@fault(
    "clipping.use_coverage:refuse_unrecorded",
    "uses of one weight that do not count together, https://github.com/meta-pytorch/opacus/pull/738",
    "clipping.beside",
    cause="counts in the norm by the layer's own use alone",
)
def use_beside_its_layer_left_out(original: Function, hit: Hit) -> Function:
    """A weight that is used without its layer is not refused: that use does not count in the norm."""

    def planted(model: Any, records: Any, losses: torch.Tensor) -> None:
        hit()

    return planted


@fault(
    "clipping.independence:refuse_rows",
    "one row of positions for a whole batch, whose norm is taken for that of each sample",
    "clipping.one-row",
    cause="runs on one row for all samples counts in the norm of each",
)
def one_row_taken_for_each_sample(original: Function, hit: Hit) -> Function:
    """A layer that runs on one row for all samples is not refused: its norm of the whole batch counts in each."""

    def planted(layer: str, rows: int, samples: int) -> None:
        hit()
        if rows != 1:
            original(layer, rows, samples)

    return planted
