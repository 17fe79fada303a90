"""Mechanisms of noise, and of what samplers draw."""

from __future__ import annotations

from tests.mechanisms.planting import Change, Collection

found = Collection("noise and samplers")
mechanism = found.mechanism


@mechanism("https://github.com/VsonicV/es-at-scale/issues/46", "noise")
def one_seed_for_all_parameters() -> Change:
    """The generator is seeded alike for each parameter: all of them get the same noise."""
    return Change("noise.gaussian", "subkey", "hashlib.blake2b(name.encode(), key=key", 'hashlib.blake2b(b"", key=key')


@mechanism("https://github.com/ihmeuw/pseudopeople/pull/280", "noise")
def one_seed_for_all_shards() -> Change:
    """Each shard draws from the beginning of the same stream: shards get the same noise."""
    return Change(
        "noise.gaussian",
        "Noise.add_",
        "self.normal(piece.name, step, piece.start, stop, deviation, *kind)",
        "self.normal(piece.name, step, 0, stop - piece.start, deviation, *kind)",
    )


@mechanism("https://github.com/intel/torch-xpu-ops/pull/5128", "noise")
def stream_replayed() -> Change:
    """Each stride of a large tensor begins at the same place of the generator's stream."""
    return Change(
        "noise.gaussian",
        "Noise.normal",
        "self._words(name, step, first, last, device)",
        "self._words(name, step, first % 2**15, first % 2**15 + last - first, device)",
    )


@mechanism("https://github.com/AI-Hypercomputer/maxdiffusion/pull/484", "noise")
def resumed_a_step_early() -> Change:
    """A checkpoint tells the number of the last step, and it is taken for that of the next: a step is done again."""
    return Change("state", "count_on", 'header["steps_taken"]', 'header["steps_taken"] - 1')


@mechanism("https://github.com/greenelab/SPRINT_gan/issues/5", "noise")
def bound_counted_twice() -> Change:
    """The noise's standard deviation has the clip norm as a factor twice, as a variance has."""
    return Change(
        "clipping.private_backward",
        "Privacy.deviation",
        "self.clipping.sensitivity / normaliser",
        "self.clipping.sensitivity**2 / normaliser",
    )


@mechanism("https://github.com/NVlabs/LongLive/issues/71", "sample draw")
def order_of_each_rank() -> Change:
    """The seed of the epoch's order has the rank in it: ranks take their shares out of different orders."""
    return Change(
        "sampling.epochs",
        "EpochSampler.order",
        "self.key.uniform(_NAME, epoch, 0,",
        "self.key.uniform(_NAME, epoch * self.axis.size + self.axis.rank, 0,",
    )


@mechanism("https://github.com/pytorch/pytorch/issues/31771", "sample draw")
def same_order_in_all_epochs() -> Change:
    """The number of the epoch never reaches the sampler: each epoch has the order of the first."""
    return Change(
        "sampling.epochs", "EpochSampler.order", "self.key.uniform(_NAME, epoch, 0,", "self.key.uniform(_NAME, 0, 0,"
    )


@mechanism("https://github.com/modelscope/ms-swift/pull/9907", "sample draw")
def tail_never_drawn() -> Change:
    """Shares are rounded down also where nothing is to be dropped: records at the end are in no share."""
    return Change(
        "sampling.epochs",
        "EpochSampler.share",
        "len(order) // count if self.drop_last else -(-len(order) // count)",
        "len(order) // count",
    )


@mechanism("https://github.com/mosaicml/composer/pull/2218", "sample draw")
def repetitions_taken_for_records() -> Change:
    """Records that only fill shares up are not told from the others."""
    return Change("sampling.epochs", "EpochSampler.share", "place >= len(order)", "False")


@mechanism("https://github.com/meta-pytorch/torchtune/issues/2339", "sample draw")
def seed_not_passed_on() -> Change:
    """The seed that the user gave does not reach the sampler, which always has the same."""
    return Change("sampling.epochs", "EpochSampler.order", "self.key.uniform(", 'Noise(b"0" * 32).uniform(')


@mechanism("https://github.com/facebookresearch/fairchem/pull/639", "sample draw")
def resumed_at_the_beginning() -> Change:
    """A sampler that goes on in the middle of an epoch begins with the epoch's first step again."""
    return Change("sampling.epochs", "EpochSampler.steps", "range(start * self.batch_size,", "range(0,")


@mechanism("https://github.com/NVIDIA/Megatron-Energon/issues/70", "sample draw", stated=False)
def ranges_overlap() -> Change:
    """Ranges of records that belong to one rank each overlap: a record is drawn for two ranks."""
    return Change(
        "sampling.poisson", "PoissonSampler.own", "min(start + share, self.dataset_size)",
        "min(start + share + 1, self.dataset_size)",
    )  # fmt: skip


@mechanism("https://github.com/pytorch/pytorch/issues/33148", "sample draw")
def as_many_micro_batches_as_drawn() -> Change:
    """A rank takes as many micro-batches as it has records for, so that ranks call different numbers of collectives."""
    return Change(
        "sampling.poisson",
        "PoissonSampler.dealt_out",
        "for k in range(self.micro_batches)]",
        "for k in range(max(1, -(-len(joined) // self.capacity)))]",
    )
