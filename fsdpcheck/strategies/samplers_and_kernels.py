"""Strategies of the cases that train nothing: samplers and kernels. Shrinking goes to one rank and the smallest shape.

Legend: D records, P shares, B samples, T positions, d input and p output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from fsdpcheck.adapters.contract import Features
from fsdpcheck.case import KernelCase, MeshSpec, SamplerCase
from fsdpcheck.case.kernel import KernelDtype, KernelSpec, MemoryLayout
from fsdpcheck.case.sampler import AxisLayout, SamplingSpec, mixing_epochs, repeated, share_count
from fsdpcheck.strategies.choice import among
from fsdpcheck.strategies.space import KernelSpace, SamplerSpace

_SEEDS = st.integers(0, (1 << 32) - 1)
_EXTENTS = (1, 2, 3, 5, 15, 16, 17, 18, 1, 2, 3, 33)
"""Sizes around those of the smallest tile, 16, and of two of them."""
_WIDE = (3, 33, 49, 65)
"""Sizes that take three tiles or more: sums of two partials are the same in both orders."""


@st.composite
def shares(draw: st.DrawFn, space: SamplerSpace, features: Features, world_sizes: Sequence[int]) -> SamplerCase:
    """Epochs dealt out in shares."""
    mesh, (along_shards, along_replicas) = _mesh(draw, features, world_sizes)
    spec = SamplingSpec(shards=along_shards, replicas=along_replicas)
    count, batch_size = share_count(spec, mesh), draw(st.integers(1, 5))
    fewest = max(16, count * (batch_size + 1)) if space.several else 1
    wrap = "wrap-around" in features.accepts
    spec = SamplingSpec(
        records=fewest + draw(st.integers(0, 24)),
        batch_size=batch_size,
        epochs=draw(st.integers(2, 3)) if space.several else draw(st.integers(1, 2)),
        shuffle=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        shards=along_shards,
        replicas=along_replicas,
    )
    if repeated(spec, mesh) and not wrap:
        spec = replace(spec, drop_last=True)
    return SamplerCase(spec, mesh, draw(_SEEDS))


@st.composite
def draws(draw: st.DrawFn, space: SamplerSpace, features: Features, world_sizes: Sequence[int]) -> SamplerCase:
    """Poisson draws of few records, so that some ranks draw none."""
    mesh, (along_shards, along_replicas) = _mesh(draw, features, world_sizes)
    spec = SamplingSpec(
        kind="poisson",
        records=draw(st.integers(1, 24)),
        batch_size=draw(st.integers(1, 4)),
        epochs=draw(st.integers(1, 2)),
        steps=draw(st.integers(*space.steps)),
        rate=draw(among((*space.rates, 1.0) if space.certain else space.rates)),
        shards=along_shards,
        replicas=along_replicas,
    )
    return SamplerCase(spec, mesh, draw(_SEEDS))


def sampled(space: SamplerSpace, features: Features, world_sizes: Sequence[int]) -> st.SearchStrategy[SamplerCase]:
    """Cases of ``space`` on one of these numbers of ranks."""
    if space.kind == "epochs":
        dealt = shares(space, features, world_sizes)
        return dealt.map(_shuffled) if space.shuffled else dealt
    drawn = draws(space, features, world_sizes)
    return drawn.map(_in_two_epochs) if space.two_epochs else drawn


def _shuffled(case: SamplerCase) -> SamplerCase:
    return replace(case, sampling=replace(case.sampling, shuffle=True))


def _in_two_epochs(case: SamplerCase) -> SamplerCase:
    return replace(case, sampling=replace(case.sampling, epochs=2))


def many_epochs(features: Features, world_sizes: Sequence[int], *, chance: float) -> list[SamplerCase]:
    """Shuffled epochs of 4 P + 1 records, so many that every record comes to every share but by ``chance``."""
    world = min(size for size in world_sizes if size > 1)
    records = 4 * world + 1
    epochs = mixing_epochs(records, world, chance)
    spec = SamplingSpec(records=records, batch_size=records, epochs=epochs, shuffle=True, drop_last=True)
    return [SamplerCase(spec, MeshSpec(world), seed=1)]


def many_draws(features: Features, world_sizes: Sequence[int]) -> list[SamplerCase]:
    """2^20 draws with probability 1/2, on 4 ranks if asked for."""
    world = max((size for size in world_sizes if size <= 4), default=min(world_sizes))
    spec = SamplingSpec("poisson", records=1 << 16, batch_size=1 << 12, steps=16, rate=0.5)
    return [SamplerCase(spec, MeshSpec(world), seed=1)]


def seldom_large(features: Features, world_sizes: Sequence[int]) -> list[SamplerCase]:
    """1024 steps of 32 records on average, on up to 4 ranks: so many that some draws of a rank are seldom large."""
    world = max((size for size in world_sizes if 1 < size <= 4), default=min(size for size in world_sizes if size > 1))
    spec = SamplingSpec("poisson", records=64, batch_size=64, steps=1024, rate=0.5)
    return [SamplerCase(spec, MeshSpec(world), seed=1)]


@st.composite
def kernels(draw: st.DrawFn, space: KernelSpace, features: Features) -> KernelCase:
    """Shapes with every remainder of the tile sizes, no sample, one or several, any strides, any accepted dtypes."""
    poison = draw(among(space.poisoned))
    least = 0 if poison == "none" else 1
    dtypes: tuple[KernelDtype, ...] = features.kernel_dtypes
    exponents = st.one_of(st.just(0), st.integers(-24, 8)) if space.numbers == "grid" else st.just(0)
    extent = among(_EXTENTS if least else (*_EXTENTS, 0))
    features_of = among(_WIDE) if space.repeated else extent
    spec = KernelSpec(
        samples=draw(among((1, 1, 2) if space.repeated else (1, 2, 2, 3) if least else (1, 2, 2, 3, 0))),
        positions=draw(extent),
        inputs=draw(features_of),
        outputs=draw(features_of),
        activations=draw(among(dtypes)),
        backprops=draw(among(dtypes)),
        memory=(draw(_MEMORY), draw(_MEMORY)),
        numbers=space.numbers,
        bound=draw(st.integers(1, 3)),
        exponents=(draw(exponents), draw(exponents)),
        spoil=poison,
        repeated=space.repeated,
    )
    return KernelCase(spec, draw(_SEEDS))


_MEMORY: st.SearchStrategy[MemoryLayout] = among(get_args(MemoryLayout))


def _mesh(
    draw: st.DrawFn, features: Features, world_sizes: Sequence[int]
) -> tuple[MeshSpec, tuple[AxisLayout, AxisLayout]]:
    """A mesh of one or two axes, and what lies along each: where a mesh has two, mostly both have several ranks."""
    limit = features.max_world_size or max(world_sizes)
    world = draw(among([size for size in world_sizes if size <= limit]))
    several = "hsdp" in features.accepts
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    replicas = draw(among(divisors + 2 * divisors[1:-1])) if several else 1
    along: list[AxisLayout] = ["distributed"]
    along += ["replicated"] if "replicated" in features.accepts else []
    return MeshSpec(world // replicas, replicas), (draw(among(along)), draw(among(along)))
