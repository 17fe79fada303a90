"""Strategies for ``@given`` tests of a user's own: numbers of ranks, meshes, shapes, layouts of samples, whole cases.

They are ordinary strategies of Hypothesis: its settings and its database work as with any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar, get_args

import hypothesis
from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features, Promise, Trait
from fsdpcheck.adapters.training_loop import ORDINARY
from fsdpcheck.case import Case, MeshSpec
from fsdpcheck.case.axes import Axis
from fsdpcheck.case.fields import MAX_WORLD_SIZE
from fsdpcheck.errors import UsageError, explain
from fsdpcheck.findings import tokens
from fsdpcheck.strategies.choice import among
from fsdpcheck.strategies.space import CaseSpace, Space
from fsdpcheck.strategies.space_drawing import WORLD_SIZES, cases_of
from fsdpcheck.strategies.spaces import PLAIN
from fsdpcheck.strategies.training import drawn_mesh
from fsdpcheck.workload import batches

Layout = tuple[tuple[int, ...], ...]
"""Which samples each rank has, in their order."""
Test = TypeVar("Test", bound=Callable[..., Any])
_PLAINLY: Final[tuple[Promise, ...]] = ("plain",)
_SAMPLED: Final[frozenset[Trait]] = frozenset({"ragged", "empty-rank", "wrap-around", "replicated"})


def worlds(fewest: int = 1, most: int = 5) -> st.SearchStrategy[int]:
    """Numbers of ranks from ``fewest`` to ``most``. Raises UsageError for numbers that are none."""
    if not 1 <= fewest <= most <= MAX_WORLD_SIZE:
        wanted = f"1 <= fewest <= most <= {MAX_WORLD_SIZE}"
        raise UsageError(explain("there are no such numbers of ranks", got=f"{fewest} to {most}", wanted=wanted))
    return st.integers(fewest, most)


def meshes(
    world_sizes: Sequence[int] = WORLD_SIZES, axes: Collection[Axis] = ("dp_replicate", "dp_shard")
) -> st.SearchStrategy[MeshSpec]:
    """Meshes of one of these numbers of ranks; an axis may have one rank. ``MeshSpec.sizes`` has the size of each.

    Raises UsageError for numbers that are none, and for axes that there are not.
    """
    for size in world_sizes or (0,):
        worlds(size, size)
    if not axes or not {*axes} <= {*get_args(Axis)}:
        raise UsageError(
            explain("there are no such axes", got=", ".join(axes) or "none", wanted=", ".join(get_args(Axis)))
        )
    replicas: frozenset[Trait] = frozenset({"hsdp"}) if {"dp_replicate", "dp_shard"} <= {*axes} else frozenset()
    features = Features(promises=frozenset(), accepts=replicas, axes=frozenset(axes))
    return _meshes(features, tuple(world_sizes))


@st.composite
def _meshes(draw: st.DrawFn, features: Features, world_sizes: tuple[int, ...]) -> MeshSpec:
    return drawn_mesh(draw, features, world_sizes)


def shapes(ranks: int = 1, dims: tuple[int, int] = (1, 3)) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of a parameter that is sharded over ``ranks`` along dim 0, of so many dims, at least and at most.

    Dim 0 is one, or stands around multiples of ``ranks``: fewer rows than ranks, as many, one more, and so on. Raises
    UsageError for numbers that are none.
    """
    worlds(ranks, ranks)
    fewest, most = dims
    if not 1 <= fewest <= most:
        raise UsageError(explain("a shape has dims", got=f"{fewest} to {most}", wanted="1 <= fewest <= most"))
    rows = sorted({1, *(size for times in (1, 2) for size in range(times * ranks - 1, times * ranks + 2) if size > 0)})
    others = st.lists(st.integers(1, 4), min_size=fewest - 1, max_size=most - 1)
    return st.builds(lambda first, rest: (first, *rest), among(rows), others)


def layouts(ranks: int) -> st.SearchStrategy[Layout]:
    """How the samples of one logical batch lie on ``ranks``: a tuple of samples a rank, counted from 0.

    In blocks, strided, ragged, as DistributedSampler deals them out, on every rank alike; some ranks may have none.
    Raises UsageError for a number that is none.
    """
    worlds(ranks, ranks)
    features = Features(promises=frozenset({"plain"}), accepts=_SAMPLED)
    space = CaseSpace(clipping=("none",), steps=(1,))
    return cases_of(space, features, (ranks,)).map(_layout)


def _layout(case: Any) -> Layout:
    return tuple(tuple(sample for micro in own for sample in micro) for own in batches.indices(case, 0))


def cases(
    space: Space = PLAIN,
    *,
    accepts: Collection[Trait] = ORDINARY,
    promises: Collection[Promise] = _PLAINLY,
    world_sizes: Sequence[int] = WORLD_SIZES,
    features: Features | None = None,
) -> st.SearchStrategy[Any]:
    """Whole cases of ``space``: a model, a mesh, a layout of the batch, a step, numbers.

    Drawn are only those that an implementation takes that ``accepts`` such traits and makes these ``promises``, or that
    has ``features``: those of an adapter. Raises UsageError for numbers of ranks that are none.
    """
    for size in world_sizes or (0,):
        worlds(size, size)
    known = features or Features(promises=frozenset(promises), accepts=frozenset(accepts))
    return cases_of(space, known, tuple(world_sizes))


def case_of(token: str) -> Case:
    """The case of a finding's token. Nothing that the token names is imported. Raises InvalidToken."""
    return tokens.decode(token).case


def example(*given: str, **named: str) -> Callable[[Test], Test]:
    """``hypothesis.example`` with the cases of tokens, such as of a finding: ``@example("v2:...")`` under ``@given``.

    Raises InvalidToken for a token that is none.
    """
    decorate: Callable[[Test], Test] = hypothesis.example(
        *map(case_of, given), **{name: case_of(token) for name, token in named.items()}
    )
    return decorate
