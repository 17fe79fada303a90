"""Cases that train: a model, its ranks, the samples of each rank, what a step does with them, and its arithmetic.

Shapes: B samples in a logical batch, W ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fsdpcheck.case import serialization, traits, validation, words
from fsdpcheck.case.axes import AXES, Axis, ModelAxis
from fsdpcheck.case.model import LayerSpec, ModelSpec
from fsdpcheck.case.vocabulary import Trait

LayoutKind = Literal["replicated", "by-replica", "contiguous", "strided", "sampler", "ragged", "listed"]
Loss = Literal["mse", "linear", "hinge", "l1", "cross_entropy"]
Clipping = Literal["none", "unclipped", "exact", "probe"]
NormMode = Literal["immediate", "deferred"]
Contribution = Literal["complete", "partial", "mixed"]
ClipGroups = Literal["all", "units"]
Dtype = Literal["float64", "float32"]
Numbers = Literal["grid", "real"]
Averaging = Literal["divide", "premultiply"]
Compute = Literal["dtype", "bfloat16", "tf32"]
OptimizerKind = Literal["sgd", "adam", "adamw", "newton_schulz", "row_scaled", "own"]
Schedule = Literal["constant", "halving"]
Grouping = Literal["one", "vectors apart", "last unit apart"]
Evaluation = Literal["no", "no_grad", "inference_mode"]
Across = Literal["nothing", "outputs", "targets"]


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Axes of the device mesh. ``world_size`` is derived, never given.

    ``axes``: those that share out the model, in the order of ``AXES``, each of two ranks or more. Ranks along them have
    the same samples. ``goes_on_at``: another number of ranks on which parameters have the same shapes, 0 for none.
    """

    dp_shard: int = 1
    dp_replicate: int = 1
    reshard_after_forward: bool = True
    axes: tuple[tuple[ModelAxis, int], ...] = ()
    goes_on_at: int = 0

    @property
    def data_ranks(self) -> int:
        """Into how many shares the samples can be dealt out, D."""
        return self.dp_shard * self.dp_replicate

    @property
    def model_ranks(self) -> int:
        """How many ranks, consecutive ones, share out one model on the same samples."""
        return math.prod(size for _, size in self.axes)

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return self.data_ranks * self.model_ranks

    @property
    def row_ranks(self) -> int:
        """How many ranks the rows of one parameter may be shared out to."""
        return math.prod(size for axis, size in self.sizes.items() if AXES[axis].rows)

    @property
    def sizes(self) -> dict[Axis, int]:
        """The axes of two ranks or more, outermost first."""
        own: dict[Axis, int] = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, **dict(self.axes)}
        return {axis: own[axis] for axis in AXES if own.get(axis, 1) > 1}


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Which rank gets which samples of the logical batch of ``batch_size`` = B samples, at every step.

    "replicated": every rank the whole batch. "contiguous", "strided": blocks or every W-th sample, B need not divide.
    "sampler": as DistributedSampler does, with ``shuffle``, and ``drop_last`` or wrap-around duplicates.
    "ragged": ``counts[r]`` consecutive samples on rank r; zeros allowed.
    "listed": rank r has the samples ``lists[r]``, positions in 0 .. B-1, in this order at every step; B is then how
    many there are to choose from, some maybe in no list and some in several. A "replicated" batch may have one list.
    "by-replica": one of such lists a replica; all ranks among which its parameters are sharded have the same samples.
    """

    kind: LayoutKind = "contiguous"
    batch_size: int = 1
    shuffle: bool = False
    drop_last: bool = False
    counts: tuple[int, ...] = ()
    lists: tuple[tuple[int, ...], ...] = ()

    def local_sizes(self, world_size: int) -> tuple[int, ...]:
        """How many samples each of the ranks that deal them out has, wrap-around duplicates included."""
        base, extra = divmod(self.batch_size, world_size)
        if self.lists:
            return tuple(len(own) for own in self.lists for _ in range(world_size // len(self.lists)))
        if self.kind == "ragged":
            return self.counts
        if self.kind == "replicated":
            return (self.batch_size,) * world_size
        if self.kind == "sampler":
            return (base if self.drop_last or not extra else base + 1,) * world_size
        return tuple(base + (rank < extra) for rank in range(world_size))


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """SGD, Adam, AdamW, a Newton-Schulz step or scaled rows; momentum and weight decay are dyadic.

    The learning rate is 2**-lr_exponent.

    ``schedule`` "halving" halves the learning rate after each step, by ``torch.optim.lr_scheduler``.
    ``groups`` "vectors apart": parameters of one dimension, biases and norms, are a group without weight decay, of half
    the learning rate. "last unit apart": so are the parameters of the last inner unit.
    "newton_schulz" updates each matrix by all of its gradient (workload/newton_schulz.py), in plain training in float64
    on a grid, without momentum, decay and global norm; and so does "row_scaled" each row of a matrix by all of the
    row's gradient (workload/row_scaling.py).
    "own" is what a user's function makes of a model (``UserModelSpec.optimizer``), in plain training; then no other
    field says anything.
    """

    kind: OptimizerKind = "sgd"
    lr_exponent: int = 0
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    groups: Grouping = "one"


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What one training step does, and how many there are.

    ``normaliser`` is N of the released gradient (1/N) * sum over the logical batch: a power of two, or one times W; an
    int where it is a whole number, otherwise a float (1.5 on 3 ranks).
    ``reduction``: "sum" backpropagates (W/N) * local sum; "mean" is FSDP's ordinary contract, each rank its local mean
    (then N = W * local size, and all local sizes are equal powers of two).
    ``clipping``: "none" is plain training; "unclipped" is private with C above every norm; "exact" private with norms
    that the instrument makes powers of two or puts at the threshold; "probe" private with any C, the instrument
    reading the coefficients. ``clip_norm`` is C in units of the per-sample loss scale (see oracle/certificate.py).
    ``clip_groups`` "units" clips each sample's gradient once for each unit and once for the root's parameters, each
    with its own bound (see workload/clip_groups.py); "all" clips it as a whole.
    ``max_grad_norm`` clips the *global* gradient norm of plain training (None: no clipping).
    ``sync_every`` reduces gradients after every micro-batch; otherwise only after the last (no_sync).
    ``noise_multiplier``: standard deviation of the noise over C, for a private step (0: none; the oracle adds none).
    ``secure_noise``: that noise is drawn by the generator that the implementation calls cryptographically secure.
    ``resume``: between steps the optimizer's state is dropped and comes back from its own ``state_dict``.
    ``evaluates``: before each step every rank runs the model on its first micro-batch, in eval mode, under that context
    of torch; a new trainer once more, before it loads what was saved.
    ``rebuilds``: before the training another model of the same kind is built, makes one step and is dropped.
    ``thaws``: behind the first step every frozen parameter is thawed (``requires_grad``), and trained from then on by
    the optimizer that has it from the beginning. ``refreezes``: behind the second step these are frozen again.
    ``unequal``: every other rank with samples of its own, the first or the second of them by the seed, has one
    micro-batch fewer; gradients are reduced after each rank's last.
    ``across``: what of the sample before, in its micro-batch, is added to a sample's own in the loss.
    "cross_entropy" is the softmax cross-entropy, summed over positions, against classes read off the targets.
    """

    loss: Loss = "mse"
    steps: int = 1
    micro_batches: int = 1
    sync_every: bool = True
    normaliser: int | float = 1
    reduction: Literal["sum", "mean"] = "sum"
    clipping: Clipping = "none"
    clip_norm: int = 1
    norms: NormMode = "immediate"
    contribution: Contribution = "complete"
    max_grad_norm: float | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    resume: bool = False
    noise_multiplier: float = 0.0
    clip_groups: ClipGroups = "all"
    evaluates: Evaluation = "no"
    rebuilds: bool = False
    thaws: bool = False
    refreezes: bool = False
    unequal: bool = False
    secure_noise: bool = False
    across: Across = "nothing"

    @property
    def private(self) -> bool:
        """Whether each sample's gradient is clipped."""
        return self.clipping != "none"

    @property
    def reductions(self) -> int:
        """How often gradients are averaged over the ranks in one step."""
        return self.micro_batches if self.sync_every else 1

    def of_steps(self, count: int) -> StepSpec:
        """The same in so many steps, without what would happen behind the last of them."""
        between = count > 1
        return replace(
            self,
            steps=count,
            resume=self.resume and between,
            thaws=self.thaws and between,
            refreezes=self.refreezes and count > 2,
        )

    def in_micro_batches(self, count: int, sync_every: bool = True) -> StepSpec:
        """The same in so many micro-batches, as many on each rank."""
        return replace(self, micro_batches=count, sync_every=sync_every, unequal=False)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """dtype, ranges of the numbers that are drawn, and whether parameters are projected to integers after a step.

    ``numbers``: "grid" draws integers, and functions that leave the grid have surrogates for the length of the run, on
    oracle and ranks alike; "real" draws many-bit fractions in the same ranges and keeps the true functions, so sums
    round and nothing is projected. ``averaging``: how simulated ranks form a collective's average: the sum divided by
    W, or ("premultiply") the sum of what each rank multiplied by 1/W before. ``compute``: what the model computes in,
    while parameters, reductions and the optimizer keep ``dtype`` = float32: "dtype" itself, "bfloat16" (operands and
    results of 8 bits, sums of 24), or "tf32" (factors of matrix products rounded to 11 bits; only a GPU that is allowed
    to does so, a CPU computes in float32). Only for numbers that are exact there: see oracle/low_precision.py.
    ``world_factors``: how often per-sample losses carry the factor W (see models.loss_scale): once for each division by
    W that may come before a sum; 0 in a plain case whose sums W need not divide, so that it shows who divides first.
    """

    dtype: Dtype = "float64"
    weights: int = 1
    inputs: int = 1
    project: bool = True
    numbers: Numbers = "grid"
    averaging: Averaging = "divide"
    compute: Compute = "dtype"
    world_factors: int = 1


@dataclass(frozen=True, slots=True)
class TrainingCase:
    """Ranks train a model. Equal cases give equal answers on every machine and torch version."""

    model: ModelSpec
    mesh: MeshSpec = MeshSpec()
    layout: BatchLayout = BatchLayout()
    step: StepSpec = StepSpec()
    arithmetic: Arithmetic = Arithmetic()
    seed: int = 0

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises InvalidCase when the case contradicts itself; every case that exists has passed."""
        validation.validate(self)

    def requires(self) -> frozenset[Trait]:
        """What the case demands of an implementation."""
        return traits.requires(self)

    def describe(self) -> str:
        """The case in words: model, ranks and batch, step, numbers; a line each."""
        return words.describe(self)

    def to_json(self) -> str:
        """One line of JSON with every field and the version; ``case.from_json`` gives an equal case back."""
        return serialization.encode(self)

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def copies(self) -> int:
        """How many ranks have the same share of the batch: consecutive ones. W if it is replicated, mostly 1.

        Each share is given to all ranks along the axes that share out the model.
        """
        of_data = {"replicated": self.mesh.data_ranks, "by-replica": self.mesh.dp_shard}.get(self.layout.kind, 1)
        return of_data * self.mesh.model_ranks

    @property
    def shares(self) -> int:
        """Into how many shares the batch is split."""
        return self.world_size // self.copies

    def thawed_in(self, step: int) -> bool:
        """Whether parameters that are frozen in the first step are trained in this one (``StepSpec.thaws``)."""
        return self.step.thaws and step > 0 and not (self.step.refreezes and step > 1)

    def has_fewer(self, rank: int) -> bool:
        """Whether the rank has one micro-batch fewer than others (``StepSpec.unequal``)."""
        return self.step.unequal and (rank // self.mesh.model_ranks + self.seed) % 2 == 1

    @property
    def local_sizes(self) -> tuple[int, ...]:
        """How many samples each rank has at every step, wrap-around duplicates included."""
        sizes = self.layout.local_sizes(self.mesh.data_ranks)
        return tuple(size for size in sizes for _ in range(self.mesh.model_ranks))


FILLER = TrainingCase(ModelSpec((LayerSpec(1),)))
"""What a case that trains nothing has in its JSON for what it has not: tokens of all kinds have the same keys."""
