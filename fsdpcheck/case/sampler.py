"""Cases of samplers: which records are dealt out, how, and to how many ranks. See ``fsdpcheck.case``.

Legend: D records of the data set, q the probability of a draw, P shares that an epoch or a batch is split into.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fsdpcheck.case import fields, serialization
from fsdpcheck.case.refusal import refuse
from fsdpcheck.case.training import FILLER, MeshSpec
from fsdpcheck.case.vocabulary import Trait
from fsdpcheck.errors import UsageError

SamplingKind = Literal["shares", "poisson"]
AxisLayout = Literal["distributed", "replicated"]
MAX_DRAWS = 1 << 21
"""Records times steps of a case, at most, so that a hostile token cannot ask for all memory."""


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """What a sampler is asked for; the mesh and the seed of the case go with it.

    "shares": every epoch deals all D ``records`` out to P shares of equal length, in dataset order or (``shuffle``) in
    a new order, any of all D! with equal probability; by leaving the last ones of the order out (``drop_last``) or by
    taking the first ones again; in steps of ``batch_size`` records of each share. "poisson": in each of ``steps`` steps
    of an epoch every record joins by itself with probability ``rate`` q; a micro-batch has ``batch_size`` records at
    most, if the sampler makes several.
    ``shards``, ``replicas``: whether ranks along this axis of the mesh have the same records or their own.
    ``start``: the first step of every epoch that is asked for, of a sampler made anew, as after a stop.
    """

    kind: SamplingKind = "shares"
    records: int = 1
    batch_size: int = 1
    epochs: int = 1
    steps: int = 1
    rate: float = 1.0
    shuffle: bool = False
    drop_last: bool = False
    shards: AxisLayout = "distributed"
    replicas: AxisLayout = "distributed"
    start: int = 0


def share_of(spec: SamplingSpec, mesh: MeshSpec, rank: int) -> int:
    """Which of the shares a rank has; rank = replica * dp_shard + place in the replica."""
    replica, place = divmod(rank, mesh.dp_shard)
    if spec.shards == "replicated":
        return replica if spec.replicas == "distributed" else 0
    return rank if spec.replicas == "distributed" else place


def share_count(spec: SamplingSpec, mesh: MeshSpec) -> int:
    """Into how many shares the records are split, P."""
    shards = mesh.dp_shard if spec.shards == "distributed" else 1
    return shards * (mesh.dp_replicate if spec.replicas == "distributed" else 1)


def repeated(spec: SamplingSpec, mesh: MeshSpec) -> int:
    """How many entries of an epoch repeat a record, so that all shares are equally long."""
    return 0 if spec.kind == "poisson" or spec.drop_last else -spec.records % share_count(spec, mesh)


def mixing_epochs(records: int, count: int, chance: float) -> int:
    """The fewest shuffled epochs E in which some record misses some of P = ``count`` shares with at most that chance.

    It is bounded by D P (1 - floor(D/P)/D)^E, the sum over records and shares; E = 1 for one share. Raises UsageError
    for fewer records than shares.
    """
    if count == 1:
        return 1
    if records < count:
        raise UsageError(f"got {records} records for {count} shares, wanted one each; next: draw more records")
    return math.ceil(math.log(chance / (records * count)) / math.log1p(-(records // count) / records))


def epoch_steps(spec: SamplingSpec, mesh: MeshSpec) -> int:
    """Steps of an epoch, counted from its first."""
    if spec.kind == "poisson":
        return spec.steps
    whole, rest = divmod(spec.records, share_count(spec, mesh))
    return -(-(whole + (rest > 0 and not spec.drop_last)) // spec.batch_size)


@dataclass(frozen=True, slots=True)
class SamplerCase:
    """Ranks draw records and train nothing."""

    sampling: SamplingSpec
    mesh: MeshSpec
    seed: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises InvalidCase when the case contradicts itself; every case that exists has passed."""
        fields.require_words([("sampling", self.sampling)])
        mesh = MeshSpec(self.mesh.dp_shard, self.mesh.dp_replicate)
        if self.mesh != mesh:
            refuse("mesh", self.mesh, f"{mesh} where nothing is trained", "leave it out")
        fields.require_ranges([*fields.of_mesh(self.mesh), fields.of_seed(self.seed), *_ranges(self.sampling)])

    def requires(self) -> frozenset[Trait]:
        """What the case demands of an implementation."""
        facts: dict[Trait, bool] = {
            "hsdp": self.mesh.dp_replicate > 1,
            "replicated": share_count(self.sampling, self.mesh) < self.world_size,
            "wrap-around": repeated(self.sampling, self.mesh) > 0,
        }
        return frozenset(trait for trait, holds in facts.items() if holds)

    def describe(self) -> str:
        """The case in words: records, ranks; a line each."""
        return _described(self)

    def to_json(self) -> str:
        """One line of JSON with every field and the version; ``case.from_json`` gives an equal case back."""
        beside = dataclasses.replace(FILLER, mesh=self.mesh, seed=self.seed)
        return serialization.encode(beside, sampling=dataclasses.asdict(self.sampling))

    @property
    def world_size(self) -> int:
        return self.mesh.world_size


def _ranges(spec: SamplingSpec) -> Iterator[fields.Range]:
    yield "sampling.records", spec.records, 1, 1 << 20
    yield "sampling.batch_size", spec.batch_size, 1, 1 << 20
    yield "sampling.epochs", spec.epochs, 1, 1 << 14
    yield "sampling.steps", spec.steps, 1, 1 << 14
    yield "sampling.start", spec.start, 0, 1 << 20
    yield "sampling.rate", spec.rate, 2.0**-20, 1.0
    yield "records times steps of sampling", spec.records * spec.steps * spec.epochs, 1, MAX_DRAWS


def _described(case: SamplerCase) -> str:
    spec, mesh = case.sampling, case.mesh
    what = f"{spec.records} records in shares of equal length, {_way(spec)}, {spec.batch_size} of each a step"
    if spec.kind == "poisson":
        what = f"Poisson draws of {spec.records} records with probability {spec.rate}, {spec.batch_size} a micro-batch"
    long = f"{spec.epochs} epochs" if spec.epochs > 1 else "1 epoch"
    long += f" of {spec.steps} steps" if spec.kind == "poisson" else ""
    long += f", from step {spec.start} on" if spec.start else ""
    axes = f"dp_shard {mesh.dp_shard} {spec.shards} x dp_replicate {mesh.dp_replicate} {spec.replicas}"
    return f"sampler: {what}; {long}\nranks: W = {mesh.world_size} ({axes}); seed {case.seed}"


def _way(spec: SamplingSpec) -> str:
    order = "shuffled" if spec.shuffle else "in dataset order"
    return f"{order}, the last ones dropped" if spec.drop_last else f"{order}, the first ones taken again"
