"""What an adapter is: how one implementation shards a model and takes a step, and what it promises.

A minimal adapter needs ``name``, ``features`` and ``build``; its trainer needs ``step`` and ``parameters``. Everything
else is optional and declared in ``Features.observables``. Arithmetic conventions are declared, not guessed. What each
promise, feature, moment and observable means stands in ``vocabulary``; `fsdpcheck list promises` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from fsdpcheck.adapters.vocabulary import WITHOUT_MODEL as WITHOUT_MODEL
from fsdpcheck.adapters.vocabulary import Moment as Moment
from fsdpcheck.adapters.vocabulary import Observable as Observable
from fsdpcheck.adapters.vocabulary import Promise as Promise
from fsdpcheck.adapters.vocabulary import Use as Use
from fsdpcheck.case import Case, Dtype, MeshSpec, StepSpec
from fsdpcheck.case import Compute as Compute
from fsdpcheck.case import Trait as Trait
from fsdpcheck.case.axes import Axis
from fsdpcheck.case.kernel import KernelDtype

Given = nn.Parameter | tuple[str, nn.Parameter]
"""What ``Setup.optimizer`` takes: a parameter of the model, or the name of one that is there and what is trained."""
Unused = Literal["none", "zero", "zero-in-used-unit", "zero-if-private"]


@dataclass(frozen=True, slots=True)
class NormRule:
    """How a norm comes of a sum of squares x, in the case's dtype: sqrt(x + eps) "inside" the root, sqrt(x) + eps
    "outside" of it. What is reported, and what clip factors follow from, is the whole expression."""

    eps: float = 0.0
    place: Literal["inside", "outside"] = "inside"


@dataclass(frozen=True, slots=True)
class FactorRule:
    """How per-sample clip factors come from squared norms, elementwise, in the case's dtype.

    "divide": C / (n + eps); "reciprocal": (n + eps).reciprocal() * C, which is what ``C / tensor`` is in PyTorch.
    Then clamp to at most 1. ``eps`` belongs to the factor alone; ``norm`` says how n itself is formed. ``nested``: n is
    the norm of per-parameter norms, not the root of the one squared norm, so factors carry its rounding and clipped
    gradients are compared within a proven bound instead of bit for bit; then ``norm`` has no eps.
    """

    eps: float = 0.0
    expression: Literal["divide", "reciprocal"] = "divide"
    nested: bool = False
    norm: NormRule = NormRule()


@dataclass(frozen=True, slots=True)
class GlobalNormRule:
    """How the global gradient norm n is formed: dtype of the sums and of the factor, and whether it is a norm of norms.

    Gradients are multiplied by min(1, max_grad_norm / (n + eps)): ``eps`` belongs to that factor alone. ``norm``: how n
    itself is formed; without an eps where ``nested``.
    """

    nested: bool = True
    dtype: Literal["case"] | Dtype = "case"
    eps: float = 1e-6
    norm: NormRule = NormRule()

    def of(self, dtype: Dtype) -> Dtype:
        """The dtype of the sums and of the factor where parameters have ``dtype``."""
        return dtype if self.dtype == "case" else self.dtype


@dataclass(frozen=True, slots=True)
class ArithmeticRule:
    """How an implementation averages over ranks, in which dtypes, and what an unused parameter has for a gradient.

    ``averaging``: "after" adds up the ranks' gradients and divides the sum by W, which rounds once; dividing by a power
    of two before changes nothing. "before" divides each rank's gradient by W, or multiplies it by the rounded 1/W, and
    then adds up, as DistributedDataParallel does, and where gradients are reduced after every micro-batch it averages
    again what it averaged before; declare it also where the sum is multiplied by the rounded 1/W. Those who divide
    "before" are judged on losses that are multiples of W, of W**K where K micro-batches are reduced one by one, for
    which a proof shows that nothing rounds (float32 has none on 7 and 13 ranks); those who divide "after" also on sums
    that W does not divide. "none" only adds them up: ``Batch.loss_scale`` is then 1/N, such that the sum
    over the ranks is the gradient, as where a loss is summed and divided by the tokens of all ranks; such adapters do
    not accept "mean".
    ``divides_by_share``: it divides by N / W as a floating-point number, so that every bit is compared only where that
    is exact.
    ``dtypes``: what parameters and gradients may have. float32 cases need the trait "float32" too; who takes float32
    alone is given no others.
    ``compute``: what the model computes in, in every training, where that is not ``dtype``: with "bfloat16" all laws
    draw cases that are exact in it, with parameters and reductions in float32, and those of real numbers are not asked.
    ``autocast``: it does so by torch.autocast, under which a matrix product has few bits also where a user's model asks
    for more by name.
    ``unused``: the gradient of a parameter that no sample of a step depends on, on any rank. "none": None, as on a
    single device, so that the optimizer leaves the parameter alone: no weight decay, no momentum. "zero": zeros, for
    which the optimizer updates it. "zero-in-used-unit": zeros if its sharding unit has another trained parameter that
    is used, otherwise None. "zero-if-private": zeros in a step that clips each sample, None in a plain one.
    """

    averaging: Literal["after", "before", "none"] = "after"
    divides_by_share: bool = False
    dtypes: tuple[Dtype, ...] = ("float64", "float32")
    compute: Compute = "dtype"
    unused: Unused = "none"
    autocast: bool = False


@dataclass(frozen=True)
class Features:
    """What an adapter promises, accepts and shows.

    ``reasons`` says, by promise, why one is *not* made; it is printed. One for "features" stands for each "features.X".
    ``owns_loss_scale``: the implementation itself turns per-sample losses into the released gradient (1/N) * sum;
    otherwise the adapter multiplies the local sum of losses by ``Batch.loss_scale`` (W/N; 1/N when replicated). N is
    ``Setup.step.normaliser``, and counts a sample once, on however many ranks it is: where the batch is replicated the
    sum over the ranks has each sample W times, so an implementation that averages over ranks divides its local sum by
    N, and one that adds them up by N W; where only ranks of one replica share samples (``replicated_shards``), by N / R
    and N W / R, with R replicas. On real
    numbers (trait "real") the factor is taken to be applied to the losses, before the backward: elsewhere it rounds
    otherwise, by an ulp; whoever applies it elsewhere does not accept "real". ``factor``, ``global_norm``,
    ``arithmetic``: by which conventions it computes. ``axes``: those that a mesh of its can have (case/axes.py, which
    says along which of them ranks have the same samples); "dp_replicate" beside "dp_shard" is the trait "hsdp".
    ``owned``: axes along which one rank alone has a parameter, as a stage of a pipeline has its layers; the others
    leave it out of what they show, and are taken to have what it shows.
    ``gauge``: whether it reduces and clips the layer that the harness puts beside a user's own model; if not, that has
    a gradient of zero in plain training. ``functions``: whether it is made of a user's functions, which declare nothing
    by themselves: what they need that is not there is then an error and no finding (judging/needs.py).
    ``rank_local``: dotted
    names "pkg.mod:NAME" of module globals that real ranks would each have for themselves. ``kernel_dtypes``: what
    kernels take, also mixed.
    """

    promises: frozenset[Promise]
    accepts: frozenset[Trait] = frozenset()
    observables: frozenset[Observable] = frozenset({"params"})
    owns_loss_scale: bool = False
    factor: FactorRule = FactorRule()
    global_norm: GlobalNormRule = GlobalNormRule()
    arithmetic: ArithmeticRule = ArithmeticRule()
    max_world_size: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    axes: frozenset[Axis] = frozenset({"dp_shard"})
    owned: frozenset[Axis] = frozenset()
    gauge: bool = True
    functions: bool = False
    rank_local: tuple[str, ...] = ()
    kernel_dtypes: tuple[KernelDtype, ...] = ("float32",)

    def reason(self, promise: str) -> str:
        """Why a promise is not made: its own reason, or its family's; "" if none is given."""
        return self.reasons.get(promise) or self.reasons.get(promise.partition(".")[0], "")

    def takes(self, case: Case, besides: frozenset[Trait] = frozenset()) -> bool:
        """Whether the implementation can be given the case: its mesh has no other axes, and its traits are accepted, or
        are ``besides``."""
        axes = self.axes | ({"dp_replicate"} if "hsdp" in self.accepts else set())
        mesh = getattr(case, "mesh", None)
        return case.requires() <= self.accepts | besides and (mesh is None or mesh.sizes.keys() <= axes)


@dataclass(frozen=True, slots=True)
class Snippets:
    """How a program of torch alone does what the adapter does: source text, for ``fsdpcheck replay --script``.

    An adapter has it as its attribute ``snippets``. In scope are ``model``, ``mesh`` (a DeviceMesh by the case's axes),
    ``UNITS`` (names of the modules to shard) and ``RANK``. ``imports``: lines of their own. ``parallelize``: lines that
    make ``parallel``, what is called, of ``model``; ``{reshard}`` stands for reshard_after_forward. ``before``: lines
    before the forward of a micro-batch, where ``reduces`` says whether its gradients are to be reduced; ``context``: an
    expression of a context around its forward and backward. ``whole``: lines that make ``whole``, the parameters by
    their names in the model, after a step.
    """

    parallelize: str
    imports: str = ""
    before: str = ""
    context: str = ""
    whole: str = "whole = dict(model.named_parameters())"


@dataclass(frozen=True)
class MicroBatch:
    """Samples of one forward. ``inputs`` [b, d], [b, T, d] or int64 [b, T]; ``targets`` [b, F + R]; b may be 0.

    ``indices`` are global sample numbers.
    """

    inputs: Tensor
    targets: Tensor
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step. ``loss_scale``: W/N, 1/N when replicated, R/N with one share for each of R replicas
    (see Features.owns_loss_scale); a W-th of it where gradients are not averaged (``ArithmeticRule.averaging``)."""

    micro_batches: tuple[MicroBatch, ...]
    loss_scale: float

    @property
    def size(self) -> int:
        """How many samples this rank has in the step."""
        return sum(len(micro.indices) for micro in self.micro_batches)


@dataclass(frozen=True)
class Setup:
    """All that ``Adapter.build`` may know besides the model.

    ``units``: canonical module names to shard, one tuple an inner unit, in forward order (one name each so far); the
    root unit is implied. ``loss(output [b, F + R], targets [b, F + R])`` gives per-sample losses [b] (loss.reduction
    == "none"); ``loss.with_reduction("mean" | "sum")`` gives the same loss reduced.
    ``replicated``: every rank is given the whole batch. ``replicated_shards``: the ranks among which parameters are
    sharded are given the same samples; replicas their own, unless ``replicated``.
    ``optimizer(parameters)`` makes the case's optimizer of all that this rank trains, as torch's own take them: plain,
    or as (name, parameter), which the trait "unit-groups" asks of those that are not the model's own.
    ``clip_norm`` is C itself (already in the units of the losses). ``clip_bounds``: for per-layer clipping, C_l by
    dotted prefix of the parameters' canonical names, "" for all the rest; {"": C} otherwise. ``seed``: what seeds the
    noise, equal on all ranks. ``rate``: with which probability a record joins a step, as an accountant is to be told.
    ``notify(moment, trainer)`` announces a ``Moment``; which of them a promise needs stands there, all others are
    optional. ``using``: features that the training is to use, of those that are promised.
    ``compile``: ``torch.compile`` as the harness wants it, for "compiled". ``compute``: what the model computes in;
    only for adapters that accept "bfloat16" or "tf32" is it not "dtype" (see ``compute_dtype``).
    """

    rank: int
    world_size: int
    mesh: MeshSpec
    step: StepSpec
    replicated: bool
    replicated_shards: bool
    units: tuple[tuple[str, ...], ...]
    loss: nn.Module
    clip_norm: float
    clip_bounds: Mapping[str, float]
    optimizer: Callable[[Iterable[Given]], torch.optim.Optimizer]
    device: torch.device
    notify: Callable[[str, object], None]
    seed: int = 0
    rate: float = 1.0
    using: frozenset[Use] = frozenset()
    compile: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    compute: Compute = "dtype"

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """torch.bfloat16 in mixed precision, else None: the model computes in its parameters' own dtype, float32.

        In mixed precision parameters and floating-point inputs are cast to it for forward and backward, outputs cast
        back before the loss; gradients are reduced, accumulated after a reduction, and given to the optimizer in the
        parameters' own dtype, which is also what is trained, and what norms are summed in. For TF32 nothing is cast: a
        GPU is allowed to round factors of matrix products, and the implementation must not forbid it.
        """
        return torch.bfloat16 if self.compute == "bfloat16" else None


@dataclass(frozen=True)
class Shard:
    """A rank's piece of one unit's flat buffer: ``data`` is live (a view), ``padding`` its slice that is padding.

    ``holds``: parameters that are trained, ones that are frozen, or the reduced gradient of a piece that is trained.
    """

    name: str
    data: Tensor
    padding: slice
    holds: Literal["trained", "frozen", "gradient"] = "trained"


@dataclass(frozen=True)
class Part:
    """This rank's part of a tensor that ranks share out without DTensor: what a trainer shows in its place.

    ``shape``: of the whole. ``axes``: those along which ranks have the other parts; along all other axes they have the
    same part. ``offsets``: where a block begins in the whole, by default at its origin; or ``start``: the first place
    of one run of values in the flattened whole, [n]. A rank with nothing of it shows a part of no values. A DTensor as
    ``value`` says itself where it lies; the axes of its mesh are then among ``axes`` on every rank.
    """

    value: Tensor
    shape: tuple[int, ...]
    axes: frozenset[Axis]
    offsets: tuple[int, ...] = ()
    start: int | None = None


@dataclass(frozen=True)
class UnitState:
    """What one sharding unit of a rank holds at a moment. ``name``: of its module, "(root)" for the root unit.

    ``gathered``: bytes of memory that hold its unsharded parameters beyond the shard itself. ``unreduced``: names of
    its parameters whose whole local gradients are held. ``aliased``: the shard and the unsharded parameters are one
    memory.
    """

    name: str
    gathered: int
    unreduced: tuple[str, ...]
    aliased: bool


@dataclass(frozen=True)
class Stored:
    """One piece of one tensor as it lies in a checkpoint.

    ``name``: a parameter's canonical name (a tied one has one); of an optimizer's state the name in the checkpoint.
    ``shape``: of the whole tensor. ``offsets`` and ``sizes``: where the piece lies in it, as the checkpoint says.
    ``value``: what lies in the file for the piece, with all of its storage. ``state``: whether it is not a parameter.
    ``of``: the canonical name of the parameter that a state belongs to; "" if to none. ``held``: how many elements the
    storage has; the harness fills it in.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    value: Tensor
    state: bool = False
    of: str = ""
    held: int | None = None


class Trainer(Protocol):
    """What ``build`` returns. Both methods are called by all ranks together, so both may communicate."""

    def step(self, batch: Batch) -> None:
        """Take one whole optimizer step on this rank's micro-batches."""

    def parameters(self) -> Mapping[str, Tensor | Part]:
        """Values by canonical name on every rank: whole tensors, or this rank's pieces, a DTensor or a Part."""


class Observed(Trainer, Protocol):
    """The optional methods, each needed only by an adapter that lists its observable."""

    def gradients(self) -> Mapping[str, Tensor | Part | None]:
        """ "grads": the gradient the optimizer used in the last step, by canonical name (trainable only), as
        ``parameters`` shows values.

        A parameter that had none is None, or is not named.
        """

    def norms(self) -> Tensor:
        """ "norms": per-sample gradient norms [local samples] of the last step, in order of the micro-batches."""

    def factors(self) -> Tensor:
        """ "factors": clip factors [local samples] of the last step; with per-layer clipping [local samples, G]."""

    def grad_norm(self) -> Tensor:
        """ "grad_norm": the global gradient norm that clipping returned in the last step (0-dim)."""

    def evaluate(self, inputs: Tensor) -> Tensor:
        """For cases with the trait "evaluation": the model's outputs [b, F + R] of a micro-batch's ``inputs``.

        Without gradients and in eval mode, as between two steps of a training; training goes on as if it had not been.
        With the trait "inference-mode" it is called within ``torch.inference_mode()``. A collective: ranks without
        samples call it with b = 0.
        """

    def thaw(self) -> None:
        """For "thawing": set ``requires_grad`` of all of the model's parameters, between two steps, as its user would.

        Raises where the implementation refuses that, on every rank alike; it may as well refuse the step behind it.
        """

    def freeze(self, names: Collection[str]) -> None:
        """For "thawing": unset ``requires_grad`` of the parameters of these canonical names, as ``thaw`` sets it.

        From then on no optimizer moves them, whatever state it has of them, nor by weight decay.
        """

    def accounted(self) -> Sequence[tuple[float, float, int]]:
        """ "accounted": what an accountant was told since the training began: (noise multiplier, rate, steps) of steps
        in their order, those before a checkpoint that was loaded among them. Equal on all ranks; no communication.
        """

    def ordered_norms(self) -> dict[str, Tensor]:
        """For "dataset-order": int64 "indices" of the last step's logical batch, ascending, and their "norms".

        "duplicates" lists the indices that occur more than once. A collective; equal on all ranks.
        """

    def shards(self) -> list[Shard]:
        """ "shards": this rank's live flat shards with their padding: of parameters, and of gradients once reduced.

        At "after_reduce" and "before_step" each that is trained needs one of its gradient, as long as itself. One that
        is missing there is a finding of the laws of padding; where none is ever shown, they end in AdapterError.
        """

    def units(self) -> list[UnitState]:
        """ "units": what each sharding unit holds now, the root first. No communication, and nothing is changed."""

    def save(self, folder: str) -> None:
        """For "state": write all that a training needs to go on into ``folder``, new, which every rank reaches."""

    def load(self, folder: str) -> None:
        """For "state": take the state over from ``folder``, written at as many ranks, or, for "resharded", at others.

        Called before any step.
        """

    def local_tensors(self) -> list[Tensor]:
        """The local parameter tensors the optimizer updates, live, for cases that project (see program).

        Needed only by who promises "sharded", and where the optimizer is not one that ``Setup.optimizer`` made, whose
        parameters are known.
        """


class Adapter(Protocol):
    """One implementation under test. ``build`` shards ``model`` in place or not, and may communicate.

    A user's own model that it cannot take it refuses by NotImplementedError, raised on every rank alike, in ``build``
    or in a step: the law is then "not supported", which is no finding and no pass. Where one rank raises and another
    goes on, and on models of which it accepts every trait, raising is a finding.
    """

    name: str
    features: Features

    def build(self, model: nn.Module, setup: Setup) -> Trainer:
        """Shard ``model`` as ``setup`` says, and return what steps it. Called once by all ranks of a training."""


class Keeping(Adapter, Protocol):
    """What an adapter that promises "stored" has besides. Both are called in one process without any group."""

    def stored(self, folder: str) -> list[Stored]:
        """All pieces of all tensors in a checkpoint: parameters, trainable and frozen, and state of optimizers."""

    def read(self, folder: str, model: nn.Module) -> None:
        """For "readable" too: fill an ordinary model from a checkpoint, as its user would, say to export it."""
