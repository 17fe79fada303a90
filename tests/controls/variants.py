"""Controls by name: ``--install tests.controls.variants:NAME`` puts one in place. See README.md beside this."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.mechanisms.planting import Change, Hits, Mechanism

_PRIVATE: Final = ("clipping.*", "norms.*", "privacy.[sin]*", "training.private-*", "invariance.private-*")
_PLAIN: Final = ("training.*", "invariance.*", "global-norm.*", "state.re*", "collectives.*")
_FLAT: Final = (*_PLAIN, "padding.*", "shards.*", "lifecycle.*", "clipping.sum", "noise.*")


@dataclass(frozen=True)
class Control:
    """A right variant, as an install. ``why``: why it is right. ``laws``: patterns of those that may be suspicious."""

    name: str
    why: str
    laws: tuple[str, ...]
    changes: tuple[Change, ...]
    adapter: str = "reference"
    _planted: Mechanism = field(init=False)

    def __post_init__(self) -> None:
        source = "https://github.com/none/issues/0"
        planted = Mechanism(self.name, "controls", source, self.why, "output", self.changes, adapter=self.adapter)
        object.__setattr__(self, "_planted", planted)

    def __call__(self) -> AbstractContextManager[Hits]:
        return self._planted()


_LINEAR, _EMBEDDING, _FACTORS = "norms.linear", "norms.embedding", "clipping.clip_factors"
_UNIT, _BUFFER, _TIED = "sharding.flat_unit", "sharding.flat_buffer", "clipping.tied_parameters"
_EARLY = "self.units[(self.units.index(unit) + 1) % len(self.units)].unshard()"
_HALVES = "self.axis.size & (self.axis.size - 1) == 0"
_DDP = "DistributedDataParallel(model, find_unused_parameters=self._find_unused)"
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
_DIRECT = "(g_BTp.transpose(1, 2) @ a_BTd).square().sum((1, 2))"
_QUOTIENT = "torch.div(_like(clip_norm, squared_norms), norms(squared_norms) + EPS)"
_CLAMPED = f"{_QUOTIENT}.clamp(max=1.0)"
_SCATTERED = "collectives.reduce_scatter_average(self, full, self.axis)"
_OWN = "self.trainable.start : self.trainable.start + self.trainable.shard_numel"
_DRAWN = "self.dealt_out((uniform < self.rate).nonzero().flatten().add(self.own.start).tolist())"
_ORDER = 'self.key.uniform("(order)", step, self.own.start, self.own.stop, torch.device("cpu")).argsort()'

_TABLE: Final[tuple[tuple[str, str, tuple[str, ...], str, str, str, str], ...]] = (
    ("direct_by_einsum", "the same products, added up by another kernel", _PRIVATE, _LINEAR, "direct", _DIRECT,
     'torch.einsum("btp,btd->bpd", g_BTp, a_BTd).square().flatten(1).sum(1)'),
    ("direct_over_positions_backwards", "the sum over positions in reverse order", _PRIVATE, _LINEAR, "direct", _DIRECT,
     "(g_BTp.flip(1).transpose(1, 2) @ a_BTd.flip(1)).square().sum((1, 2))"),
    ("direct_by_rows", "squares added up by rows first, then over rows", _PRIVATE, _LINEAR, "direct", _DIRECT,
     "(g_BTp.transpose(1, 2) @ a_BTd).square().sum(2).sum(1)"),
    ("always_gram", "the Gram form of the same norm, whatever it costs", _PRIVATE, _LINEAR, "prefers_gram",
     "T == 1 or T * (d + p) <= d * p", "True"),
    ("never_gram", "the direct form of the same norm, whatever it costs", _PRIVATE, _LINEAR, "prefers_gram",
     "T == 1 or T * (d + p) <= d * p", "False"),
    ("bias_term_first", "two terms of a norm added in the other order", _PRIVATE, _LINEAR, "squared_norm",
     "squared_B + bias_squared_norm(g_BTp)", "bias_squared_norm(g_BTp) + squared_B"),
    ("embedding_rows_backwards", "positions of a token added up in reverse order", _PRIVATE, _EMBEDDING,
     "rows_squared_norm", "index_add_(0, place, g_BTp.flatten(0, 1))",
     "index_add_(0, place.flip(0), g_BTp.flatten(0, 1).flip(0))"),
    ("factor_by_where", "min(1, q) written as a choice: where n + eps <= C the quotient is 1 at least", _PRIVATE,
     _FACTORS, "factors", _CLAMPED,
     f"torch.where(norms(squared_norms) + EPS <= clip_norm, torch.ones_like(squared_norms), {_QUOTIENT})"),
    ("factor_by_minimum", "min(1, q) as torch.minimum", _PRIVATE, _FACTORS, "factors", _CLAMPED,
     f"torch.minimum({_QUOTIENT}, torch.ones_like(squared_norms))"),
    ("factors_from_the_last", "elementwise, so that the order of samples is nothing", _PRIVATE, _FACTORS, "factors",
     _CLAMPED, f"{_CLAMPED}.flip(0).clone().flip(0)"),
    ("norm_by_power", "a power of one half is the square root", _PRIVATE, _FACTORS, "norms", "squared_norms.sqrt()",
     "squared_norms.pow(0.5)"),
    ("global_factor_out_of_place", "the same product, written back", ("global-norm.*", "precision.global-norm"),
     _FACTORS, "clip_global_norm", "shard.grad.mul_(coefficient)", "shard.grad.copy_(shard.grad * coefficient)"),
    ("global_norm_by_dot", "a sum of squares as a product with itself", ("global-norm.*", "padding.unread-global-norm"),
     _FACTORS, "global_squared_norm", "own_gradient(piece).square().sum()",
     "own_gradient(piece).flatten().dot(own_gradient(piece).flatten())"),
    ("global_norm_from_the_last", "parameters' terms added in reverse order", ("global-norm.*",), _FACTORS,
     "global_squared_norm", "torch.stack(squares).sum()", "torch.stack(squares[::-1]).sum()"),
    ("partial_terms_first", "complete and partial terms added in the other order", ("norms.*",),
     "clipping.norm_aggregation", "squared_norms", "terms.complete + sum_over(terms.partial, axis)",
     "sum_over(terms.partial, axis) + terms.complete"),
    ("sorted_by_sort", "a stable sort instead of a stable argsort", ("norms.dataset-order",),
     "clipping.norm_aggregation", "in_dataset_order", "torch.argsort(indices, stable=True)",
     "indices.sort(stable=True).indices"),
    ("tied_uses_backwards", "uses of a tied weight added in reverse order", _PRIVATE, _TIED, "summed",
     "[use.per_sample_gradient()[attribute] for use, attribute in own]",
     "[use.per_sample_gradient()[attribute] for use, attribute in reversed(own)]"),
    ("all_reduced_and_cut", "an all-reduce gives what a reduce-scatter gives, and more that is dropped", _FLAT, _UNIT,
     "FlatUnit.reduce_gradients", _SCATTERED,
     f"collectives.all_reduce_average(self, full, self.axis)[{_OWN}].clone()"),
    ("a_message_before_each_reduction", "every rank sends it, and nobody reads it", _FLAT, _UNIT,
     "FlatUnit.reduce_gradients", _SCATTERED,
     f"(collectives.all_reduce_sum(self, full.new_zeros(1), self.axis), {_SCATTERED})[1]"),
    ("a_barrier_before_each_reduction", "every rank waits for all, and nothing is sent", _FLAT, _UNIT,
     "FlatUnit.reduce_gradients", _SCATTERED,
     f"(self.axis.size > 1 and torch.distributed.barrier(self.axis.group), {_SCATTERED})[1]"),
    ("every_other_unit", "layers of every other unit are left to the root: the same parameters, shared out otherwise",
     (*_PRIVATE, *_PLAIN, "padding.*", "clipping.sum"), "sharding.flat_model", "make_units",
     "by_unit(module, unit_names, places)", "by_unit(module, unit_names[::2], places)"),
    ("prefetched", "the next unit is gathered before this one computes, and freed behind its own forward",
     (*_PRIVATE, *_PLAIN, "padding.*"), "sharding.flat_model", "ShardedModel._before_forward", "unit.unshard()",
     f"(unit.unshard(), {_EARLY})"),
    ("divided_before_the_sum", "a division by a power of two is exact, before a sum or behind it", _FLAT, _UNIT,
     "FlatUnit.reduce_gradients", _SCATTERED,
     f"collectives.all_reduce_sum(self, full / self.axis.size, self.axis)[{_OWN}].clone() if {_HALVES} else"
     f" {_SCATTERED}"),
    ("accumulated_the_other_way", "two terms of a sum", _FLAT, _UNIT, "FlatUnit.accumulate", "shard.grad + gradient",
     "gradient + shard.grad"),
    ("accumulated_in_place", "nobody else holds the sum of before", _FLAT, _UNIT, "FlatUnit.accumulate",
     "shard.grad + gradient", "shard.grad.add_(gradient)"),
    ("gathered_from_a_copy", "a copy of the shard is sent", _FLAT, _UNIT, "FlatUnit.unshard",
     "buffer.shard.detach().to(full.dtype)", "buffer.shard.detach().clone().to(full.dtype)"),
    ("shards_are_aligned", "shards are rounded up to multiples of 8 elements, by more padding", _FLAT, _BUFFER,
     "FlatBuffer.__init__", "-(-self.numel // axis.size)",
     "-(-self.numel // (8 * axis.size)) * 8 if axis.size > 1 else self.numel"),
    ("updated_one_by_one", "the optimizer's loop instead of its fused lists", _PLAIN, "trainer", "Trainer.update",
     "self.optimizer.step()",
     "([group.update(foreach=False) for group in self.optimizer.param_groups], self.optimizer.step())"),
    ("gram_by_rows", "terms of the Gram form added up by rows first", _PRIVATE, _LINEAR, "gram",
     "(g_BTp @ g_BTp.transpose(1, 2))).sum((1, 2))", "(g_BTp @ g_BTp.transpose(1, 2))).sum(2).sum(1)"),
    ("gram_by_einsum", "the same products, added up by another kernel", _PRIVATE, _LINEAR, "gram",
     "(a_BTd @ a_BTd.transpose(1, 2))", 'torch.einsum("btd,bsd->bts", a_BTd, a_BTd)'),
    ("bias_over_positions_backwards", "the sum over positions in reverse order", _PRIVATE, _LINEAR,
     "bias_squared_norm", "g_BTp.sum(1)", "g_BTp.flip(1).sum(1)"),
    ("bias_by_einsum", "a sum of squares as a product with itself", _PRIVATE, _LINEAR, "bias_squared_norm",
     "g_BTp.sum(1).square().sum(1)", 'torch.einsum("bp,bp->b", g_BTp.sum(1), g_BTp.sum(1))'),
    ("terms_of_layers_first", "two terms of a norm added in the other order", _PRIVATE, "norms._terms", "squares",
     "squared_B + gradient.unsqueeze(-1).flatten(1).square().sum(1)",
     "gradient.unsqueeze(-1).flatten(1).square().sum(1) + squared_B"),
    ("squares_backwards", "squares added up from the last", _PRIVATE, "norms._terms", "squares",
     ".flatten(1).square().sum(1)", ".flatten(1).flip(1).square().sum(1)"),
    ("convolution_groups_backwards", "groups of a convolution added up from the last", _PRIVATE, "norms.conv",
     "squared_norm", ".reshape(len(backprops), module.groups).sum(1)",
     ".reshape(len(backprops), module.groups).flip(1).sum(1)"),
    ("convolution_bias_backwards", "the sum over places in reverse order", _PRIVATE, "norms.conv", "squared_norm",
     "backprops.flatten(2).sum(2).square().sum(1)", "backprops.flatten(2).flip(2).sum(2).square().sum(1)"),
    ("bag_factors_swapped", "two factors of a product", _PRIVATE, "norms.embedding_bag", "squared_norm",
     "g_Bp.square().sum(1) * squared_counts(module, activations).to(g_Bp.dtype)",
     "squared_counts(module, activations).to(g_Bp.dtype) * g_Bp.square().sum(1)"),
    ("group_norm_backwards", "the sum over positions in reverse order", _PRIVATE, "norms.group_norm",
     "per_sample_gradient", "_positions_last(x_BC).sum(2)", "_positions_last(x_BC).flip(2).sum(2)"),
    ("layer_norm_backwards", "the sum over positions in reverse order", _PRIVATE, "norms.layer_norm",
     "sum_over_positions", ".sum(1)", ".flip(1).sum(1)"),
    ("rms_factors_swapped", "two factors of a product", _PRIVATE, "norms.rms_norm", "per_sample_gradient",
     "normalised(module, activations) * backprops", "backprops * normalised(module, activations)"),
    ("plain_weights_by_product", "one times the weight of a sample", _PLAIN, "trainer", "Trainer.micro_step",
     "torch.full_like(losses, self.scale(micro), requires_grad=False)",
     "torch.ones_like(losses.detach()) * self.scale(micro)"),
    ("scale_times_factors", "two factors of a product", _PRIVATE, "clipping.private_backward",
     "PrivateBackward.backward", "self.model.backward(losses, factors * scale, sync=sync)",
     "self.model.backward(losses, scale * factors, sync=sync)"),
    ("deviation_times_draw", "two factors of a product", ("noise.*", "privacy.noise"), "noise.gaussian", "Noise.normal",
     "box_muller(*self._words(name, step, first, last, device)) * deviation",
     "deviation * box_muller(*self._words(name, step, first, last, device))"),
    ("zeros_of_torch", "the same zeros, made by another function", _FLAT, _BUFFER, "FlatBuffer.pack",
     "first.new_zeros(size, dtype=dtype) if piece is None",
     "torch.zeros(size, dtype=dtype, device=first.device) if piece is None"),
    ("split_by_method", "the same views", _FLAT, _BUFFER, "FlatBuffer.views",
     "torch.split_with_sizes(flat[: self.numel], self.sizes)", "flat[: self.numel].split(self.sizes)"),
    ("shown_from_a_copy", "the same values, copied once more", _FLAT, _UNIT, "gather_whole", "column_Ws.reshape(-1)",
     "column_Ws.reshape(-1).clone()"),
    ("gathered_twice", "what is gathered again is the same", ("training.*", "invariance.*", "lifecycle.*"), _UNIT,
     "FlatUnit.unshard", "buffer.attach()",
     "(collectives.all_gather(self, full, buffer.shard.detach().to(full.dtype), self.axis), buffer.attach())"),
    ("unreduced_gradients_copied", "a copy of the packed gradients is reduced", _FLAT, _UNIT,
     "FlatUnit.reduce_gradients", "self.trainable.pack(self.trainable.local_gradients())",
     "self.trainable.pack(self.trainable.local_gradients()).clone()"),
    ("global_factor_by_minimum", "min(1, q) as torch.minimum", ("global-norm.*", "precision.global-norm"), _FACTORS,
     "global_factor", "torch.clamp(max_norm / (norm + EPS), max=1.0)",
     "torch.minimum(max_norm / (norm + EPS), torch.ones_like(norm))"),
    ("norms_in_two_parts", "elementwise, so that the batch may be cut", _PRIVATE, _FACTORS, "norms",
     "squared_norms.sqrt()", "torch.cat([part.sqrt() for part in squared_norms.tensor_split(2)])"),
    ("rows_of_tokens_from_the_last", "sums of one sample's rows in reverse order", _PRIVATE, _EMBEDDING,
     "rows_squared_norm", "index_add_(0, pairs // rows, sums.square().sum(1))",
     "index_add_(0, (pairs // rows).flip(0), sums.square().sum(1).flip(0))"),
    ("noise_in_small_blocks", "any split of a range of draws gives the bits of the whole", ("noise.*", "privacy.noise"),
     "noise.gaussian", "Noise.normal", "BLOCK.get(device.type, OTHER_BLOCK)", "64"),
    ("upper_draws", "a uniform number is above 1 - q as often as below q", ("samplers.poisson-*",), "sampling.poisson",
     "PoissonSampler.draw", "(uniform < self.rate)", "(uniform >= 1 - self.rate)"),
    ("binomial_size", "a uniform subset of binomial size is a Poisson draw (jax_privacy#121)",
     ("samplers.poisson-once", "samplers.poisson-steps", "samplers.poisson-law", "samplers.poisson-rate"),
     "sampling.poisson", "PoissonSampler.draw", _DRAWN,
     f"self.dealt_out(({_ORDER}[: int((uniform < self.rate).sum())] + self.own.start).sort().values.tolist())"),
)  # fmt: skip
"""(name, why it is right, laws, module, function, what stands there, what stands there instead)."""

_DIVIDES_FIRST: Final = Control(
    "divided_first_by_a_hook",
    "each rank's gradient is divided by W and then summed, by torch's own hook: what DDP promises without one, too",
    ("training.*", "invariance.*", "global-norm.*", "collectives.*"),
    (
        Change(
            "builtin.ddp", "DistributedDataParallelAdapter.build", _DDP,
            f"(lambda ddp: (ddp.register_comm_hook(None, __import__({_HOOKS!r}, fromlist=['one']).allreduce_hook),"
            f" ddp)[1])({_DDP})", "fsdpcheck.adapters",
        ),
    ),
    adapter="ddp",
)  # fmt: skip

ALL: Final[dict[str, Control]] = {
    name: Control(name, why, laws, (Change(module, function, old, new),))
    for name, why, laws, module, function, old, new in _TABLE
} | {_DIVIDES_FIRST.name: _DIVIDES_FIRST}


def __getattr__(name: str) -> Any:
    if name in ALL:
        return ALL[name]
    raise AttributeError(f"there is no control {name!r}, there are {', '.join(ALL)}")
