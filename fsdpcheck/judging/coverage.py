"""Coverage: what must occur among the judged cases of a law, what did not, and what kept it out.

A law that was judged on few cases, or on none of the kind that it is about, says nothing: its verdict is then "too few
cases" and never "holds". Everything here is a function of plain data; ``judging`` counts, and asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from fsdpcheck.case import Case, KernelCase, TrainingCase, Trait
from fsdpcheck.case.axes import AXES, Axis
from fsdpcheck.case.traits import OF_MODELS
from fsdpcheck.case.vocabulary import TRAITS

Cause = Literal["budget", "restriction", "ranks", "own model", "drawing"]
"""What kept cases out: the user's budget, what adapter or user restrict, the numbers of ranks that were asked for, or
fsdpcheck's own drawing and proofs."""


@dataclass(frozen=True)
class Label:
    """What judged cases are counted under. ``words``: what such a case has, for reports.

    ``traits``: what an implementation has to accept for any case to have it; ``ranks``: the fewest on which one can;
    ``no_prime``: not on a prime number of them; ``axes``: the mesh must be able to have one
    of them. ``of_model``: a user's own model has it or has not. ``computed``: only
    a run, or the answer, tells whether a case has it; ``facts`` tell all others. ``sought``: such a case is looked for
    and not demanded, because what an adapter accepts may leave none that can be proved. ``within``: another label that
    all such cases have, which is one that a case tells by itself.
    """

    words: str
    traits: frozenset[Trait] = frozenset()
    ranks: int = 1
    of_model: bool = False
    computed: bool = False
    no_prime: bool = False
    axes: frozenset[Axis] = frozenset()
    sought: bool = False
    within: str = ""

    def can_be_on(self, ranks: int) -> bool:
        """Whether any case on ``ranks`` ranks can have it."""
        return ranks >= self.ranks and not (self.no_prime and all(ranks % n for n in range(2, ranks)))


SEVERAL_RANKS: Final = "several ranks"
DISTRIBUTED: Final = "distributed batch on several ranks"
SEVERAL_UNITS: Final = "several units"
SHARDED_UNITS: Final = "several units sharded over several ranks"
SHARDED_REPLICAS: Final = "replicas of several shards"
EMPTY_SHARD: Final = "forward without samples beside other shards"
SEVERAL_STEPS: Final = "several steps"
LINEAR: Final = "sgd without weight decay"
THREE_STEPS: Final = "three steps with a bias"
SEVERAL_SAMPLES: Final = "several samples"
CLIPPED: Final = "clipped sample"
UNCLIPPED: Final = "unclipped sample"
CLIPPED_NORM: Final = "clipped by the global norm"
GRADIENT: Final = "non-zero gradient"
MANY_BITS: Final = "gradient of more than 8 bits"
OTHER_START: Final = "later step from other parameters"
LEFT_OUT: Final = "parameter left out of a step of Adam"

_OF_DATA: Final[frozenset[Axis]] = frozenset(axis for axis, row in AXES.items() if not row.same)
_OF_OPTIMIZERS: Final = frozenset(
    {
        LINEAR,
        OTHER_START,
        LEFT_OUT,
        "momentum",
        "weight-decay",
        "adam",
        "adamw",
        "matrix-optimizer",
        "row-optimizer",
        "schedule",
        "resume",
    }
)
"""Labels of the optimizers that are drawn; at the rate of a user's own hardly any parameter may come to move."""
_OF_FEW_BITS: Final = {GRADIENT: MANY_BITS, SEVERAL_STEPS: OTHER_START}
"""Label -> what cases must have besides where a user's model computes in bfloat16: without it what keeps gradients in
its bits would hold, and what goes on with copies that were cast once."""
_OF_SHARDS: Final[frozenset[Trait]] = frozenset({"uneven-rows", "rows<ranks"})

LABELS: Final[Mapping[str, Label]] = {
    SEVERAL_RANKS: Label("several ranks", ranks=2),
    DISTRIBUTED: Label("several ranks with a distributed batch", ranks=2, axes=_OF_DATA),
    SEVERAL_UNITS: Label("several sharding units", of_model=True),
    SHARDED_UNITS: Label(
        "several units that are sharded over several ranks", ranks=2, of_model=True, axes=frozenset({"dp_shard"})
    ),
    SHARDED_REPLICAS: Label("several replicas of several shards each", frozenset({"hsdp"}), ranks=4, no_prime=True),
    EMPTY_SHARD: Label(
        "a forward without samples on a rank whose shards others need then",
        frozenset({"empty-rank"}),
        ranks=2,
        axes=frozenset({"dp_shard"}),
    ),
    SEVERAL_STEPS: Label("several steps"),
    LINEAR: Label("an update that is linear in the gradients: SGD without weight decay"),
    THREE_STEPS: Label("three steps of a model with a trained bias", frozenset({"bias"}), of_model=True, sought=True),
    SEVERAL_SAMPLES: Label("several samples in one call"),
    CLIPPED: Label("a sample whose clip factor is below 1", computed=True),
    UNCLIPPED: Label("a sample whose clip factor is 1", computed=True),
    CLIPPED_NORM: Label("a gradient whose norm is above the bound", computed=True),
    GRADIENT: Label("a gradient that is not zero", computed=True),
    MANY_BITS: Label("a reduced gradient of more bits than a bfloat16 has", computed=True),
    LEFT_OUT: Label(
        "a parameter that a step of Adam leaves out and a later one trains", frozenset({"adam"}), computed=True
    ),
    OTHER_START: Label("a later step that starts from other parameters", computed=True, within=SEVERAL_STEPS),
    **{
        trait: Label(
            row.meaning,
            frozenset({trait}),
            row.ranks,
            of_model=trait in OF_MODELS | _OF_SHARDS,
            no_prime=row.no_prime,
        )
        for trait, row in TRAITS.items()
    },
}
"""Labels that laws name: what a case is like beside its traits, then every trait."""


def facts(case: Case) -> Iterator[str]:
    """The labels that a case has beside its traits, as far as it tells them by itself."""
    if case.world_size > 1:
        yield SEVERAL_RANKS
    if isinstance(case, KernelCase) and case.kernel.samples > 1:
        yield SEVERAL_SAMPLES
    if not isinstance(case, TrainingCase):
        return
    if case.shares > 1:
        yield DISTRIBUTED
    if case.model.unit_count > 1:
        yield SEVERAL_UNITS
        if case.mesh.dp_shard > 1:
            yield SHARDED_UNITS
    if case.mesh.dp_replicate > 1 and case.mesh.dp_shard > 1:
        yield SHARDED_REPLICAS
    if case.mesh.dp_shard > 1 and min(case.local_sizes) < min(case.step.micro_batches, max(case.local_sizes)):
        yield EMPTY_SHARD
    if case.step.steps > 1:
        yield SEVERAL_STEPS
    if case.step.optimizer.kind == "sgd" and not case.step.optimizer.weight_decay:
        yield LINEAR
    if case.step.steps > 2 and any(one.bias and one.frozen not in ("bias", "all") for one in case.model.layers):
        yield THREE_STEPS


def has(case: Case, label: str) -> bool:
    """Whether a case has a label that it tells by itself."""
    return label in facts(case) or label in case.requires()


@dataclass(frozen=True)
class Limits:
    """What bounds the cases of a law. ``world_sizes``: numbers of ranks that are drawn from.

    ``accepts``: traits that the adapter accepts and nobody avoids; ``avoided``: accepted, and left out by the user.
    ``own``: whether the model is the user's own; ``own_optimizer``: and so its optimizer. ``axes``: those that its
    meshes can have. ``few_bits``: whether a user's model computes in bfloat16.
    """

    accepts: frozenset[Trait]
    world_sizes: tuple[int, ...]
    avoided: frozenset[Trait] = frozenset()
    own: bool = False
    axes: frozenset[Axis] = frozenset(AXES)
    own_optimizer: bool = False
    few_bits: bool = False

    def against(self, label: str) -> str:
        """Why no case can have ``label``; "" if one can, or if only the user's own model decides."""
        wanted = LABELS[label]
        if self.own_optimizer and label in _OF_OPTIMIZERS:
            return "the optimizer is your own"
        if wanted.ranks > max(self.world_sizes):
            return f"no more than {max(self.world_sizes)} ranks are asked for or taken, it needs {wanted.ranks}"
        if not any(map(wanted.can_be_on, self.world_sizes)):
            sizes = ", ".join(map(str, dict.fromkeys(self.world_sizes)))
            return f"it needs a number of ranks that is no prime, asked for or taken are {sizes}"
        if wanted.axes and not wanted.axes & self.axes:
            return f"no mesh of the adapter has the axis {' or '.join(sorted(wanted.axes))} (Features.axes)"
        if avoided := wanted.traits & self.avoided:
            return f"avoided: {', '.join(sorted(avoided))}"
        if unmet := wanted.traits - self.accepts:
            return f"the adapter does not accept {', '.join(sorted(unmet))}"
        return ""


@dataclass(frozen=True)
class Judged:
    """What came of the drawing of one law.

    ``wanted``: how many draws had to be judged; ``judged`` how many were. ``census`` counts judged cases by label.
    ``rejected`` and ``unfit`` count distinct cases: outside the exact domain, and ones of which the law says nothing on
    this implementation, ``elsewhere`` those of the latter that could be judged on other numbers of ranks;
    ``most_often``: the most frequent reason. ``exhausted``: there are no other cases. ``spent``:
    the budget ended the drawing.
    """

    wanted: int
    judged: int
    census: Mapping[str, int]
    rejected: int = 0
    unfit: int = 0
    most_often: str = ""
    exhausted: bool = False
    spent: bool = False
    elsewhere: int = 0

    @property
    def enough(self) -> bool:
        """Whether the least number of cases was judged, or all that there are."""
        return self.judged >= self.wanted or (self.exhausted and self.judged > 0)

    @property
    def needs_other_ranks(self) -> bool:
        """Whether the number of ranks kept most of the cases out that could not be judged."""
        return 2 * self.elsewhere > self.rejected + self.unfit


@dataclass(frozen=True)
class Shortfall:
    """Why a law's cases are too few, in words, and what kept the others out."""

    cause: Cause
    reason: str


def demanded(must_occur: Iterable[str], vacuous_without: Iterable[str], limits: Limits) -> tuple[str, ...]:
    """The labels that must occur within ``limits``: all that the law is vacuous without, and the others if they can."""
    possible = (label for label in _possible(must_occur, limits) if not LABELS[label].sought)
    found = tuple(dict.fromkeys((*vacuous_without, *possible)))
    few = (_OF_FEW_BITS[label] for label in found if limits.few_bits and label in _OF_FEW_BITS)
    return (*found, *_possible(few, limits))


def sought(must_occur: Iterable[str], limits: Limits) -> tuple[str, ...]:
    """The labels that are looked for within ``limits``, and without which the verdict stands all the same."""
    return tuple(label for label in _possible(must_occur, limits) if LABELS[label].sought)


def _possible(labels: Iterable[str], limits: Limits) -> Iterator[str]:
    return (label for label in labels if not limits.against(label) and not (limits.own and LABELS[label].of_model))


def missing(labels: Iterable[str], census: Mapping[str, int]) -> tuple[str, ...]:
    """Those that no judged case had."""
    return tuple(label for label in labels if not census.get(label))


def shortfall(labels: Iterable[str], limits: Limits, of: Judged) -> Shortfall | None:
    """What is short of what a verdict takes: judged cases, or ones with the demanded ``labels``; None if nothing is."""
    never = missing(labels, of.census)
    if of.enough and not never:
        return None
    why = _restrictions(never, limits, of)
    cause: Cause = "budget" if of.spent else "restriction" if why else "drawing"
    cause = "own model" if not of.spent and why == [_OWN] else cause
    cause = "ranks" if not of.spent and of.needs_other_ranks else cause
    lines = [f"judged {of.judged} of {of.wanted} cases at least; {of.rejected + of.unfit} rejected"]
    if of.enough:
        lines = [f"{of.judged} cases judged; {of.rejected + of.unfit} rejected"]
    lines[0] += f", most often: {of.most_often}" if of.most_often else ""
    lines += [f"  never   {LABELS[label].words}: without it the law says nothing" for label in never]
    lines += [f"  because {reason}" for reason in (("the budget was spent",) if of.spent else why)]
    return Shortfall(cause, "\n".join([*lines, f"  next    {_NEXT[cause]}"]))


_OWN: Final = "the model is your own"
_NEXT: Final[Mapping[Cause, str]] = {
    "budget": "give it a larger --budget, or choose fewer laws with --law",
    "restriction": "lift what restricts the cases, or leave this law out (--law): nothing is claimed of it",
    "ranks": "ask for other numbers of ranks as well (--world-size), or leave this law out (--law)",
    "own model": "try more cases (--profile ci), or leave this law out (--law): nothing is claimed of it",
    "drawing": "report it as an error of fsdpcheck, which draws or proves too little here; nothing is claimed",
}


def _restrictions(never: Iterable[str], limits: Limits, of: Judged) -> list[str]:
    """What adapter or user keep out; nothing where what is drawn is rejected for its numbers alone."""
    found = [reason for label in never if (reason := limits.against(label))]
    told = limits.avoided and not any(reason.startswith("avoided") for reason in found)
    avoided = [f"avoided: {', '.join(sorted(limits.avoided))}"] * bool(told)
    if of.unfit > of.rejected:
        found += ["of most cases the law says nothing on what the adapter accepts and shows", *avoided]
    elif never and of.enough:
        found += avoided
    if limits.own:
        found.append(_OWN)
    return list(dict.fromkeys(found))
