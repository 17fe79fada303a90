"""Planted bugs of samplers: records on several ranks, ranks out of step, draws that are no Poisson draws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..noise import gaussian
from ..sampling import poisson
from ._fault import Function, Hit, fault


@fault(
    "sampling.epochs:EpochSampler.order",
    "no global seed: every process shuffles by itself, https://github.com/Lightning-AI/pytorch-lightning/pull/17713",
    "samplers.dealt",
    cause="ranks do not split one and the same order",
)
def every_rank_shuffles_by_itself(original: Function, hit: Hit) -> Function:
    """The order of an epoch is another on every rank."""

    def planted(self: Any, epoch: int) -> list[int]:
        order: list[int] = original(self, epoch)
        number, _ = self.layouts.share(self.axis, self.replicas)
        hit()
        return order[number:] + order[:number]

    return planted


@fault(
    "clipping.batch_layout:Layouts.share",
    "the data-parallel rank taken from the wrong mesh axis, https://github.com/pytorch/torchtitan/issues/1842",
    "samplers.dealt",
    cause="axis is not the one that the samples are replicated over",
)
def share_by_the_other_axis(original: Function, hit: Hit) -> Function:
    """Where samples are replicated over one axis of the mesh, shares are numbered along that one."""

    def planted(self: Any, axis: Any, replicas: Any) -> tuple[int, int]:
        number, count = original(self, axis, replicas)
        other = axis if self.shards == "replicated" else replicas
        if axis.size > 1 and replicas.size > 1 and self.shards != self.replicas:
            hit()
            return other.rank % count, count
        return number, count

    return planted


@fault(
    "sampling.epochs:EpochSampler.share",
    "a loader without padding, https://github.com/pytorch/torchtitan/issues/1618",
    "samplers.steps",
    cause="shares are not made equally long",
)
def rest_dealt_out(original: Function, hit: Hit) -> Function:
    """The last records go to the first ranks, whose epochs are then longer."""

    def planted(self: Any, epoch: int) -> list[tuple[int, bool]]:
        order, (number, count) = self.order(epoch), self.layouts.share(self.axis, self.replicas)
        if len(order) % count:
            hit()
        return [(record, False) for record in order[number::count]]

    return planted


@fault(
    "sampling.epochs:EpochSampler.order",
    "set_epoch forgotten; calls DistributedSampler's documentation warns of",
    "samplers.epochs",
    cause="its number does not reach the shuffle",
)
def epoch_never_told(original: Function, hit: Hit) -> Function:
    """Every epoch has the order of the first."""

    def planted(self: Any, epoch: int) -> list[int]:
        hit()
        order: list[int] = original(self, 0)
        return order

    return planted


@fault(
    "sampling.epochs:EpochSampler.order",
    "a sampler that is made without the user's seed, https://github.com/meta-pytorch/torchtune/issues/2339",
    "samplers.seeded",
    cause="seed does not reach the shuffle",
)
def orders_of_seed_zero(original: Function, hit: Hit) -> Function:
    """The order of an epoch is that of seed 0, whatever the seed is."""

    def planted(self: Any, epoch: int) -> list[int]:
        if self.shuffle:
            hit()
        order: list[int] = original(replace(self, key=gaussian.seeded(0)), epoch)
        return order

    return planted


@fault(
    "sampling.epochs:EpochSampler.order",
    "a data set cut to a multiple of the ranks before it is shuffled, so that its last records are never trained with",
    "samplers.shuffled",
    cause="left out of every epoch",
)
def same_records_left_out(original: Function, hit: Hit) -> Function:
    """The records that do not go into equal shares are the last ones of the data set, in every epoch."""

    def planted(self: Any, epoch: int) -> list[int]:
        order: list[int] = original(self, epoch)
        _, count = self.layouts.share(self.axis, self.replicas)
        kept = len(order) - len(order) % count
        if self.drop_last and self.shuffle and kept < len(order):
            hit()
            order.sort(key=lambda record: record >= kept)
        return order

    return planted


@fault(
    "sampling.epochs:EpochSampler.order",
    "a data set split among the ranks once, and shuffled by each of them within its part",
    "samplers.shuffled",
    cause="shuffled within shares",
)
def shares_keep_their_records(original: Function, hit: Hit) -> Function:
    """Every share has the same records in all epochs, in an order that is new each time."""

    def planted(self: Any, epoch: int) -> list[int]:
        order: list[int] = original(self, epoch)
        _, count = self.layouts.share(self.axis, self.replicas)
        if count > 1 and self.shuffle:
            hit()
            seen = [0] * count
            rounds = dict[int, tuple[int, int]]()
            for record in order:
                rounds[record] = (seen[record % count], record % count)
                seen[record % count] += 1
            order.sort(key=lambda record: rounds[record])
        return order

    return planted


@fault(
    "sampling.epochs:EpochSampler.steps",
    "a resumed loader that begins at iteration 0, https://github.com/huggingface/accelerate/pull/4071",
    "samplers.resumed",
    cause="the epoch begins again after a stop",
)
def resumed_from_the_start(original: Function, hit: Hit) -> Function:
    """The step at which to go on is not used."""

    def planted(self: Any, epoch: int, start: int = 0) -> Any:
        if start:
            hit()
        return original(self, epoch)

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "every rank draws from the whole data set, https://github.com/meta-pytorch/opacus/issues/444",
    "samplers.poisson-once",
    cause=r"record \d+ belongs to shares",
)
def neighbours_record_drawn_too(original: Function, hit: Hit) -> Function:
    """A rank that draws its first record hands it to the rank before it as well."""

    def planted(self: Any, step: int) -> list[list[int]]:
        drawn: list[list[int]] = original(self, step)
        behind = self.own.stop
        if behind < self.dataset_size:
            theirs = self.key.uniform("(which records join)", step, behind, behind + 1, torch.device("cpu"))
            if float(theirs) < self.rate and len(drawn[-1]) < self.capacity:
                hit()
                drawn[-1].append(behind)
        return drawn

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "a distributed sampler that yields nothing for an empty draw, https://github.com/meta-pytorch/opacus/pull/164",
    "samplers.poisson-steps",
    cause="empty micro-batches are left out",
)
def empty_draws_left_out(original: Function, hit: Hit) -> Function:
    """Micro-batches without a record are left out."""

    def planted(self: Any, step: int) -> list[list[int]]:
        drawn: list[list[int]] = original(self, step)
        if not all(drawn):
            hit()
        return [chunk for chunk in drawn if chunk]

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "ranks seeded alike, https://github.com/meta-pytorch/opacus/pull/271",
    "samplers.poisson-law",
    cause="ranks draw the same stream",
)
def ranks_draw_one_stream(original: Function, hit: Hit) -> Function:
    """Every rank draws for its records what the first rank draws for its own, place by place."""

    def planted(self: Any, step: int) -> Any:
        if self.axis.rank:
            hit()
        uniform = self.key.uniform("(which records join)", step, 0, len(self.own), torch.device("cpu"))
        joined = (uniform < self.rate).nonzero().flatten().add(self.own.start).tolist()
        return self.dealt_out(joined)

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "shuffled batches of one size, https://github.com/lxuechen/private-transformers/issues/7",
    "samplers.poisson-law",
    cause="size of a batch is fixed",
)
def batches_of_one_size(original: Function, hit: Hit) -> Function:
    """Each share's batch has the expected number of records, a uniform subset of its own."""

    def planted(self: Any, step: int) -> Any:
        hit()
        uniform = self.key.uniform("(which records join)", step, self.own.start, self.own.stop, torch.device("cpu"))
        size = round(self.rate * len(self.own))
        joined = uniform.argsort()[:size].sort().values.add(self.own.start).tolist()
        return self.dealt_out(joined)

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "a sampler that is made without the user's seed, https://github.com/facebookresearch/fairchem/pull/697",
    "samplers.poisson-seeded",
    cause="seed does not reach the draws",
)
def draws_of_seed_zero(original: Function, hit: Hit) -> Function:
    """Records are drawn as with seed 0, whatever the seed is."""

    def planted(self: Any, step: int) -> list[list[int]]:
        hit()
        drawn: list[list[int]] = original(replace(self, key=gaussian.seeded(0)), step)
        return drawn

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "a rate from another count than was drawn with, https://github.com/meta-pytorch/opacus/issues/813",
    "samplers.poisson-rate",
    cause=r"probability is not 0\.5: 0\.49\d* of all",
)
def rate_one_percent_low(original: Function, hit: Hit) -> Function:
    """Records join with 0.99 times the probability."""

    def planted(self: Any, step: int) -> Any:
        hit()
        uniform = self.key.uniform("(which records join)", step, self.own.start, self.own.stop, torch.device("cpu"))
        joined = (uniform < 0.99 * self.rate).nonzero().flatten().add(self.own.start).tolist()
        return self.dealt_out(joined)

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "draws from the generator of each rank, https://github.com/meta-pytorch/opacus/pull/271",
    "samplers.poisson-world",
    cause="stay on their rank are drawn otherwise among other ranks",
)
def draws_keyed_by_rank(original: Function, hit: Hit) -> Function:
    """Draws are independent, and a function of the rank that makes them."""

    def planted(self: Any, step: int) -> Any:
        hit()
        name = f"(which records join rank {self.axis.rank} of {self.axis.size})"
        uniform = self.key.uniform(name, step, self.own.start, self.own.stop, torch.device("cpu"))
        joined = (uniform < self.rate).nonzero().flatten().add(self.own.start).tolist()
        return self.dealt_out(joined)

    return planted


@fault(
    "sampling.poisson:PoissonSampler.dealt_out",
    "batches cut off at a largest size, https://github.com/google-deepmind/jax_privacy/issues/121",
    "samplers.poisson-room",
    cause="draws many records leaves some out",
)
def large_draws_cut_off(original: Function, hit: Hit) -> Function:
    """A rank has room for all but one in 256 of its draws; records beyond it are left out."""

    def planted(self: Any, joined: list[int]) -> list[list[int]]:
        room = max(1, poisson._quantile(-(-self.dataset_size // self.axis.size), self.rate, 2.0**-8))
        if len(joined) > room:
            hit()
        return original(self, joined[:room])  # type: ignore[no-any-return]

    return planted


@fault(
    "sampling.poisson:PoissonSampler.draw",
    "a resumed loader that begins at iteration 0, https://github.com/huggingface/accelerate/pull/4203",
    "samplers.poisson-resumed",
    cause="the epoch begins again after a stop",
)
def draws_counted_by_the_sampler(original: Function, hit: Hit) -> Function:
    """Draws are numbered by the sampler itself, from 0 whenever it is made."""
    counts: dict[int, tuple[Any, int]] = {}

    def planted(self: Any, step: int) -> list[list[int]]:
        _, count = counts.get(id(self), (self, 0))
        counts[id(self)] = (self, count + 1)  # keeps the sampler, so that no other has its id
        if count != step:
            hit()
        drawn: list[list[int]] = original(self, count)
        return drawn

    return planted
