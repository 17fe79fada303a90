"""Noise: words against published vectors, and bits that depend on key, parameter, element and step alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.impl.noise import gaussian, prng
from fsdpcheck.impl.noise.gaussian import Noise
from fsdpcheck.impl.sharding import collectives
from fsdpcheck.impl.sharding.collectives import Axis
from fsdpcheck.impl.sharding.flat_buffer import FlatBuffer
from fsdpcheck.impl.sharding.protocol import Piece

CPU = torch.device("cpu")
SEEDED = gaussian.seeded(7)
CHACHA = Noise(bytes(range(32)), "chacha20")
BOTH = pytest.mark.parametrize("source", [SEEDED, CHACHA], ids=lambda source: source.generator)


def draw(
    source: Noise, start: int, stop: int, name: str = "w", step: int = 3, dtype: torch.dtype = torch.double
) -> Tensor:
    return source.standard_normal(name, step, start, stop, dtype, CPU)


def hexadecimal(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _words(found: list[torch.Tensor]) -> list[int]:
    """What a generator gives for one element."""
    return [int(word) for word in found]


PUBLISHED = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""(counter, key, words) of philox4x32 with 10 rounds: the file kat_vectors of Random123."""


@pytest.mark.parametrize(("counter", "key", "wanted"), PUBLISHED)
def test_philox_gives_the_published_words_of_each_element(counter: str, key: str, wanted: str) -> None:
    tensors = [torch.tensor([word, 0, word]) for word in hexadecimal(counter)]
    first, _, last = torch.stack(prng.philox4x32(tensors, hexadecimal(key)), 1).tolist()
    assert first == last == hexadecimal(wanted)


def test_chacha20_gives_the_words_of_rfc_8439() -> None:
    """Section 2.3.2."""
    key = [int.from_bytes(bytes(range(i, i + 4)), "little") for i in range(0, 32, 4)]
    wanted = """e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
                466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"""
    counter = hexadecimal("1 09000000 4a000000 0")
    tensors = [torch.tensor([word, 0, word]) for word in counter]
    first, _, last = torch.stack(prng.chacha20(tensors, key), 1).tolist()
    assert first == last == hexadecimal(wanted)
    assert _words(prng.chacha20(counter, key)) == hexadecimal(wanted)


def test_the_counter_is_the_element_then_the_step_and_the_key_is_made_from_the_name() -> None:
    far, step = 2**32 + 5, 2**33 + 9
    key = gaussian.subkey(SEEDED.key, "w", 2)
    got = gaussian.philox_words(key, step, far, far + 1, CPU)
    assert _words(got) == _words(prng.philox4x32([5, 1, 9, 2], key))


def test_keys_of_parameters_are_frozen() -> None:
    """Resumed runs depend on them. BLAKE2b of RFC 7693 by itself is hashlib's to test."""
    assert gaussian.subkey(gaussian.seeded(0).key, "layers.0.weight", 2) == [3740566107, 2410930890]


def test_elements_take_the_words_of_a_chacha_block_in_order() -> None:
    key = gaussian.subkey(CHACHA.key, "w", 8)
    got = torch.stack(gaussian.chacha_words(key, 3, 8, 16, CPU), 1).flatten().tolist()
    assert got == [word for block in (2, 3) for word in _words(prng.chacha20([block, 0, 3, 0], key))]


def test_gaussians_are_box_muller_of_the_top_53_bits() -> None:
    """By Python's own functions: equal when rounded to float32."""
    columns = gaussian.philox_words(gaussian.subkey(SEEDED.key, "w", 2), 3, 0, 50, CPU)
    wanted = []
    for w0, w1, w2, w3 in zip(*(column.tolist() for column in columns), strict=True):
        u, v = ((w0 << 21 | w1 >> 11) + 1) / 2**53, (w2 << 21 | w3 >> 11) / 2**53
        wanted.append(math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v))
    assert draw(SEEDED, 0, 50, dtype=torch.float32).tolist() == torch.tensor(wanted).tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@BOTH
def test_a_gpu_has_the_same_words_and_gaussians_within_2_ulp(source: Noise) -> None:
    drawn = [source._words("w", 3, 0, 2048, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert all(torch.equal(x, y.cpu()) for x, y in zip(*drawn, strict=True))
    here, there = draw(source, 0, 2048), source.standard_normal("w", 3, 0, 2048, torch.double, torch.device("cuda"))
    ulp = torch.nextafter(here.abs(), torch.full_like(here, math.inf)) - here.abs()
    assert ((here - there.cpu()).abs() <= 2 * ulp).all()


def test_the_extremes_are_finite() -> None:
    most = torch.tensor([prng.MASK])
    zero = torch.zeros_like(most)
    assert gaussian.box_muller(most, most, zero, zero).tolist() == [0.0]
    (largest,) = gaussian.box_muller(zero, zero, zero, zero).tolist()
    assert 8.57 < largest < 8.58


@BOTH
@pytest.mark.parametrize(("dtype", "apart"), [(torch.float64, 1), (torch.bfloat16, 7)])
def test_every_split_of_a_range_gives_the_bits_of_the_whole(source: Noise, dtype: torch.dtype, apart: int) -> None:
    """In bfloat16 not at all places, but at all that a block of 2, 4, 8 or 16 has."""
    n = 71
    whole = draw(source, 0, n, dtype=dtype)
    assert whole.dtype == dtype
    for cut in range(0, n + 1, apart):
        parts = [draw(source, 0, cut, dtype=dtype), draw(source, cut, n, dtype=dtype)]
        assert torch.equal(torch.cat(parts), whole), cut


@BOTH
def test_blocks_and_large_positions_change_no_bits(source: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    start = 2**32 - 1000
    whole = draw(source, start, start + 3000)
    monkeypatch.setitem(gaussian.BLOCK, "cpu", 128)
    assert torch.equal(draw(source, start, start + 3000), whole)
    assert torch.equal(draw(source, start + 990, start + 1010), whole[990:1010])


@BOTH
def test_another_seed_parameter_or_step_gives_other_noise(source: Noise) -> None:
    other = gaussian.seeded(8) if source is SEEDED else Noise(bytes(32), "chacha20")
    drawn = [draw(source, 0, 50), draw(source, 0, 50, name="v"), draw(source, 0, 50, step=4), draw(other, 0, 50)]
    drawn.append(draw(source, 50, 100))
    values = torch.cat(drawn)
    assert len(values.unique()) == len(values) == 250


QUANTILE = NormalDist().inv_cdf
DRAWS = math.ceil(2 * ((QUANTILE(0.5e-6) + QUANTILE(0.01)) / (1.01**2 - 1)) ** 2)
"""About 259,000: so many squares tell a standard deviation of 1.01 from 1 at level 1e-6 with power 0.99."""
LEVEL = 1e-6
"""Each test below rejects a right generator with this probability. The draws are fixed: it happens always or never."""


@pytest.fixture(scope="module", params=[SEEDED, CHACHA], ids=lambda source: source.generator)
def sample(request: pytest.FixtureRequest) -> Tensor:
    return draw(request.param, 0, DRAWS)


def scale_p(values: Tensor) -> float:
    """Two-sided p-value of the sum of squares."""
    from scipy import stats

    below = stats.chi2.cdf(values.square().sum().item(), len(values))
    return float(2 * min(below, 1 - below))


def test_the_scale_is_one_and_one_per_cent_off_is_seen(sample: Tensor) -> None:
    assert scale_p(sample) > LEVEL
    assert scale_p(sample * 1.01) < LEVEL
    assert scale_p(sample * 0.99) < LEVEL


def test_the_distribution_is_normal_and_another_of_equal_variance_is_not(sample: Tensor) -> None:
    from scipy import stats

    assert stats.kstest(sample.numpy(), "norm").pvalue > LEVEL
    uniform = (stats.norm.cdf(sample.numpy()) - 0.5) * math.sqrt(12)
    assert stats.kstest(uniform, "norm").pvalue < LEVEL


def correlation_p(x: Tensor, y: Tensor) -> float:
    from scipy import stats

    return float(stats.pearsonr(x.numpy(), y.numpy()).pvalue)


@BOTH
def test_neighbours_steps_parameters_and_seeds_are_uncorrelated(source: Noise) -> None:
    other = gaussian.seeded(8) if source is SEEDED else Noise(bytes(32), "chacha20")
    n = 50_000
    x = draw(source, 0, n)
    pairs = {
        "neighbour": draw(source, 1, n + 1),
        "step": draw(source, 0, n, step=4),
        "parameter": draw(source, 0, n, name="v"),
        "seed": draw(other, 0, n),
    }
    assert {name: correlation_p(x, y) > LEVEL for name, y in pairs.items()} == dict.fromkeys(pairs, True)
    assert correlation_p(x, pairs["step"] + 0.05 * x) < LEVEL


class Largest(TorchDispatchMode):
    """The most numbers in one tensor that an operation returned."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


@BOTH
def test_nothing_larger_than_a_block_and_the_range_is_made(source: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gaussian.BLOCK, "cpu", 256)
    with Largest() as largest:
        draw(source, 10**9, 10**9 + 10)
    assert 0 < largest.numbers <= 64 * 4
    with Largest() as largest:
        draw(source, 10**9, 10**9 + 10_000)
    assert largest.numbers == 10_000


SHAPES: dict[str, tuple[int, ...]] = {
    "a.weight": (3, 5),
    "a.bias": (3,),
    "none": (0,),
    "b.weight": (7, 9),
    "scale": (1,),
}


def buffer(world_size: int, rank: int, trainable: bool = True) -> FlatBuffer:
    named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    return FlatBuffer(named, Axis(None, rank, world_size), trainable)


def sharded(world_size: int, of: Callable[[FlatBuffer], Tensor]) -> Tensor:
    """The shards of all ranks end to end, without padding, which has to be zero."""
    buffers = [buffer(world_size, rank) for rank in range(world_size)]
    shards = [of(each) for each in buffers]
    for each, shard in zip(buffers, shards, strict=True):
        assert shard.shape == each.shard.shape
        assert not shard[each.padding].any()
    return torch.cat([shard[: each.real] for each, shard in zip(buffers, shards, strict=True)])


def noisy_gradient(each: FlatBuffer) -> Tensor:
    each.shard.grad = torch.zeros_like(each.shard)
    SEEDED.add_(each.pieces(), 3, 0.5)
    return each.shard.grad


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 83])
def test_every_sharding_of_a_buffer_has_the_noise_of_its_parameters(world_size: int) -> None:
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    wanted = torch.cat([0.5 * draw(SEEDED, 0, n, name) for name, n in sizes.items()]).float()
    assert torch.equal(sharded(world_size, lambda each: SEEDED.of_shard(each, 3, 0.5)), wanted)
    assert torch.equal(sharded(world_size, noisy_gradient), wanted)


def test_noise_that_each_rank_counts_from_its_own_shard_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: positions are counted in the shard, not in the parameter."""
    honest = Noise.normal

    def local(self: Noise, name: str, step: int, start: int, stop: int, *rest: Any) -> Tensor:
        return honest(self, name, step, 0, stop - start, *rest)

    whole = sharded(1, noisy_gradient)
    monkeypatch.setattr(Noise, "normal", local)
    assert torch.equal(sharded(1, noisy_gradient), whole)
    assert not torch.equal(sharded(2, noisy_gradient), whole)


def test_a_frozen_buffer_gets_no_noise() -> None:
    assert not SEEDED.of_shard(buffer(2, 0, trainable=False), 3).any()


def test_noise_is_added_to_what_is_there_and_rounded_once() -> None:
    gradient = torch.arange(5.0)
    SEEDED.add_([Piece("w", 10, torch.zeros(5), gradient)], 3, 0.3)
    assert torch.equal(gradient, torch.arange(5.0) + (0.3 * draw(SEEDED, 10, 15)).float())


def test_a_piece_without_a_gradient_is_refused_before_any_is_changed() -> None:
    gradient = torch.zeros(5)
    pieces = [Piece("w", 0, torch.zeros(5), gradient), Piece("v", 0, torch.zeros(5), None)]
    with pytest.raises(RuntimeError, match="no reduced gradient of v: reduce"):
        SEEDED.add_(pieces, 3, 1.0)
    assert not gradient.any()


@pytest.mark.parametrize("deviation", [-1.0, math.inf, math.nan])
def test_senseless_deviations_are_refused(deviation: float) -> None:
    with pytest.raises(ValueError, match="wanted a finite one"):
        SEEDED.add_([], 0, deviation)
    with pytest.raises(ValueError, match="wanted a finite one"):
        SEEDED.of_shard(buffer(1, 0), 0, deviation)


@pytest.mark.parametrize(("start", "stop", "step"), [(-1, 2, 0), (3, 2, 0), (0, 2, -1), (0, 2**63, 0), (0, 1, 2**63)])
def test_senseless_ranges_are_refused(start: int, stop: int, step: int) -> None:
    with pytest.raises(ValueError, match="wanted 0 <= start <= stop"):
        draw(SEEDED, start, stop, step=step)


def test_senseless_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="got seed -1"):
        gaussian.seeded(-1)
    with pytest.raises(ValueError, match="got a key of 3 bytes, wanted 32"):
        Noise(b"abc")


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_secure_ranks_share_one_key_of_one_message_and_each_call_has_its_own(ranks: Any, world_size: int) -> None:
    def body(rank: int) -> list[Noise]:
        return [gaussian.secure(collectives.axis()) for _ in range(2)]

    found = ranks(body, world_size)
    first, second = found[0]
    assert found == [[first, second]] * world_size
    assert first.key != second.key
    assert first.generator == "chacha20"
    assert len(set(first.key)) > 1
    assert ranks.trace(0) == [("all_reduce", gaussian.KEY.fqn)] * (2 if world_size > 1 else 0)


def test_the_key_is_not_printed() -> None:
    assert "hidden" in repr(SEEDED)
    assert str(SEEDED.key) not in repr(SEEDED)
