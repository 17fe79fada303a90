"""Spaces of cases, as data: which cases a law is about, and what must occur among them.

A space says what is drawn and draws nothing itself (``strategies.cases_of``). Spaces compare by value: where
``space.drawn`` is equal, the same features and numbers of ranks give the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

from hypothesis.strategies import SearchStrategy

from fsdpcheck.adapters.contract import Features, Promise
from fsdpcheck.case import Case, Clipping, Compute, Contribution, NormMode, Numbers, Trait
from fsdpcheck.case.kernel import KernelNumbers, Spoil
from fsdpcheck.errors import UsageError, spelling

UserModels = Literal["any", "known layers", "never"]
DrawnNumbers = Literal["grid", "real", "either"]
Adjustment = Literal[
    "any sum", "one step", "any clip norm", "a bias", "partial terms", "in replicas", "on real numbers", "evaluated",
    "thawed", "tied apart", "one row", "unequal micro-batches", "left out",
    "grouped", "evaluated at times", "secure at times", "beside", "rows for many", "across samples",
]  # fmt: skip
"""What is changed in every drawn case; ``strategies/adjustments.py`` has what each does."""

_DEMANDED: dict[Adjustment, frozenset[Trait]] = {
    "on real numbers": frozenset({"real"}),
    "in replicas": frozenset({"replicated-shards", "hsdp"}),
    "evaluated": frozenset({"evaluation"}),
    "unequal micro-batches": frozenset({"unequal-micro-batches", "micro-batches", "no-sync"}),
}
_ADDED: dict[Adjustment, frozenset[Trait]] = {
    "thawed": frozenset({"thawed", "frozen-again"}),
    "tied apart": frozenset({"tied-apart"}),
    "one row": frozenset({"one-row-private"}),
    "beside": frozenset({"beside-private"}),
    "across samples": frozenset({"across-samples-private"}),
}
"""What cases have whether it is accepted or not: their laws take a refusal as well."""
_TOLD = ("user_models", "must_occur", "vacuous_without")
"""Fields that say what is asked of the cases and change none of them."""


@dataclass(frozen=True)
class Family:
    """A clipping family that is drawn where all words in ``where`` hold of an implementation, and none in ``unless``.

    A word is a promise, an accepted trait, or "nested": norms are nested square roots.
    """

    clipping: Clipping
    where: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_known("a clipping family", (*self.where, *self.unless), (*get_args(Promise), *_TRAITS, "nested"))

    def is_drawn(self, features: Features) -> bool:
        """Whether the family is drawn for an implementation with these features."""
        held = {*features.promises, *features.accepts, *(("nested",) if features.factor.nested else ())}
        return held.issuperset(self.where) and held.isdisjoint(self.unless)

    def __str__(self) -> str:
        where = f" where {' and '.join(self.where)}" if self.where else ""
        return self.clipping + where + (f" unless {' or '.join(self.unless)}" if self.unless else "")


@dataclass(frozen=True, kw_only=True)
class Space:
    """What every space of cases says.

    ``ranks``: the fewest on which the law says anything; smaller worlds are not drawn. ``user_models``: whether the
    cases can be had on a user's own model: any, none, or only one whose parameters lie in layers of torch that have a
    word among the traits. ``must_occur``: labels (coverage.LABELS) that judged cases must have where they can;
    ``vacuous_without``: labels without which a law's "holds" says nothing, so none is given without them.
    """

    ranks: int = 1
    user_models: UserModels = "any"
    must_occur: tuple[str, ...] = ()
    vacuous_without: tuple[str, ...] = ()

    def but(self, **changes: Any) -> Self:
        """The same space, with other values in these fields."""
        known = [one.name for one in fields(self)]
        _require_known(f"a {type(self).__name__}", changes, known, "field")
        return replace(self, **changes)

    @property
    def drawn(self) -> Self:
        """The space without what changes no case: two laws may draw together where this is equal."""
        return self.but(user_models="any", must_occur=(), vacuous_without=())

    @property
    def demands(self) -> frozenset[Trait]:
        """Traits that every case of the space demands."""
        return frozenset()

    @property
    def added(self) -> frozenset[Trait]:
        """Traits that its cases have whether they are accepted or not."""
        return frozenset()

    @property
    def key(self) -> str:
        """What names the space: where two spaces have other keys, other cases are drawn."""
        return f"{type(self).__name__}: {self.describe()}"

    def describe(self) -> str:
        """What is drawn, in words: each field that is not what it is by default."""
        return "; ".join(self._words()) or "every case"

    def _words(self) -> Iterator[str]:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name not in _TOLD and value != one.default:
                yield f"{one.name.replace('_', ' ')}: {_shown(value)}"


@dataclass(frozen=True, kw_only=True)
class CaseSpace(Space):
    """Cases that train.

    ``clipping``: the families to draw from; where none of them is drawn for an implementation, the first is.
    "deferred" ``norms`` are drawn only if promised; "partial" and "mixed" ``contributions`` only if "partial-norms" is,
    and then with a replicated batch (with distributed samples they are not computable). ``norms`` and
    ``contributions`` narrow both further. ``replicated`` asks for replicated batches only, or none. ``numbers``:
    "either" are real where real numbers are accepted, and on the grid elsewhere; with real ones the true functions are
    drawn whether surrogates are accepted or not. ``compute``: in what the model computes, if not in the dtype of the
    case (see strategies/low_precision.py). ``global_norm``: with ``max_grad_norm``, below and above the norms that
    occur. ``tiny_only``: float32 cases where float32 is accepted, the smallest numbers and sizes, and whole
    normalisers. ``steps``: numbers of steps to draw from. ``units``: the fewest that a model is cut into, where no
    tied weight keeps layers together. ``by_unit``: whether to clip the parameters of each unit apart, to draw from
    where that is accepted and the model has units. ``left_out``: traits that no case demands. ``worlds``: the numbers
    of ranks, whatever are asked for; ``most_ranks``: the most, where fewer are asked for too. ``adjusted``: what is
    then changed in every case, in this order.
    """

    clipping: tuple[Clipping | Family, ...] = ("none", "unclipped", "exact", "probe")
    norms: tuple[NormMode, ...] = ("immediate", "deferred")
    contributions: tuple[Contribution, ...] = ("complete", "partial", "mixed")
    replicated: bool | None = None
    numbers: DrawnNumbers = "grid"
    compute: Compute = "dtype"
    global_norm: bool = False
    tiny_only: bool = False
    steps: tuple[int, ...] = (1, 1, 1, 2, 2, 3)
    units: int = 0
    by_unit: tuple[bool, ...] = (False, False, False, True)
    left_out: frozenset[Trait] = frozenset()
    worlds: tuple[int, ...] = ()
    most_ranks: int | None = None
    adjusted: tuple[Adjustment, ...] = ()

    def __post_init__(self) -> None:
        _require_known("a CaseSpace", self.left_out, _TRAITS, "trait")
        _require_known("a CaseSpace", self.adjusted, get_args(Adjustment), "adjustment")
        families = [family for family in self.clipping if isinstance(family, str)]
        _require_known("a CaseSpace", families, get_args(Clipping), "clipping family")

    def without(self, *traits: Trait) -> Self:
        """The same space, but for the cases that demand one of these traits."""
        return self.but(left_out=self.left_out | {*traits})

    def families(self, features: Features) -> tuple[Clipping, ...]:
        """The clipping families that are drawn for an implementation with these features."""
        families = [family if isinstance(family, Family) else Family(family) for family in self.clipping]
        drawn = [family for family in families if family.is_drawn(features)]
        return tuple(family.clipping for family in drawn or families[:1])

    def numbers_for(self, features: Features) -> Numbers:
        """The numbers that are drawn for an implementation with these features."""
        real = self.numbers == "real" or (self.numbers == "either" and "real" in features.accepts)
        return "real" if real else "grid"

    def worlds_of(self, world_sizes: Sequence[int]) -> tuple[int, ...]:
        """The numbers of ranks that are drawn from where these are asked for."""
        if self.worlds:
            return self.worlds
        sizes = tuple(size for size in world_sizes if size <= (self.most_ranks or size)) or (min(world_sizes),)
        if "in replicas" not in self.adjusted:
            return sizes
        return tuple(size for size in sizes if any(size % replicas == 0 for replicas in range(2, size))) or sizes

    @property
    def demands(self) -> frozenset[Trait]:
        own: set[Trait] = {"real"} if self.numbers == "real" else set()
        own |= {"replicated"} if self.replicated else set()
        own |= {self.compute} if self.compute != "dtype" else set()
        return frozenset(own).union(*(_DEMANDED.get(adjustment, frozenset()) for adjustment in self.adjusted))

    @property
    def added(self) -> frozenset[Trait]:
        return frozenset[Trait]().union(*(_ADDED.get(adjustment, frozenset()) for adjustment in self.adjusted))


@dataclass(frozen=True, kw_only=True)
class SamplerSpace(Space):
    """Cases that sample and train nothing: epochs dealt out in shares, or Poisson draws of few records.

    ``several``: of epochs, two or three of 16 records or more, and two steps or more; ``shuffled``: each of them. Of
    Poisson draws: ``steps``: the fewest and the most; ``rates``: probabilities to draw from, ``certain``: and 1;
    ``two_epochs``: always two.
    """

    kind: Literal["epochs", "poisson"]
    several: bool = False
    shuffled: bool = False
    steps: tuple[int, int] = (2, 12)
    rates: tuple[float, ...] = (0.5, 0.25, 0.125, 0.75)
    certain: bool = True
    two_epochs: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelSpace(Space):
    """Cases that call a kernel of per-sample norms.

    ``poisoned``: what one sample has in it. ``repeated``: sizes that take three tiles or more, of equal inputs.
    """

    numbers: KernelNumbers = "grid"
    poisoned: tuple[Spoil, ...] = ("none",)
    repeated: bool = False


Build = Callable[[Features, tuple[int, ...]], SearchStrategy[Case] | Sequence[Case]]


@dataclass(frozen=True, kw_only=True)
class BuiltSpace(Space):
    """Cases that no other space describes: ``build(features, world_sizes)`` gives a strategy, or the cases themselves.

    They must be what an implementation with these features accepts, on one of these numbers of ranks. Two such spaces
    are equal where ``build`` is one object.
    """

    build: Build
    words: str = field(default="built by hand", compare=False)

    @property
    def key(self) -> str:
        return f"{self.words}, by {getattr(self.build, '__qualname__', 'a part of a function')}"

    def describe(self) -> str:
        return self.words


_TRAITS: tuple[str, ...] = get_args(Trait)


def _require_known(of: str, words: Iterable[object], known: Sequence[str], kind: str = "word") -> None:
    for word in words:
        if word not in known:
            raise UsageError(
                f"{of} has no {kind} called {word!r}\n  got     {word!r}\n  wanted  one of {', '.join(known)}\n"
                f"  next    write the {kind} as it stands there.{spelling.hint(str(word), known)}"
            )


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return ", ".join(sorted(map(str, value)))
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
