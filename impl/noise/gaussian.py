"""Noise: Gaussian noise that is a function of (key, parameter, element, step) and of nothing else.

Element i of the flattened parameter called ``name`` gets at step s::

    w0, w1, w2, w3 = words of (i, s) under a key made from (key, name)             four 32-bit words
    u = (top 53 bits of w0 w1, plus 1) / 2^53     v = (top 53 bits of w2 w3) / 2^53      u in (0, 1], v in [0, 1)
    z = sqrt(-2 ln u) cos(2 pi v)                                              Box-Muller, in float64, |z| < 8.58

so the noise does not depend on how a model is sharded: W ranks draw, bit for bit, what a single device draws, replicas
agree without a message, each rank draws only elements that it owns, padding and frozen parameters get none, and to
resume it is enough to know key and step. Words are equal on all devices; ln, cos and sqrt may differ by 2 ulp between
*types* of device. Temporary memory is bounded by a constant (``BLOCK``), not by the size of a parameter.

What this is not. The words of ``seeded`` come from Philox4x32-10, which is *not* a cryptographically secure generator:
who sees some outputs may compute others. ``secure`` takes them from ChaCha20 under a 256-bit key of the operating
system. Either way the noise is a rounded Gaussian in floating point, and such noise is attackable: the gaps between the
values it can take depend on the true sum, so that a released value may exclude a neighbouring data set altogether.
A proof of differential privacy holds for real numbers, not for these.

Sources: Philox, Salmon et al. 2011, doi:10.1145/2063384.2063405; ChaCha20, RFC 8439; Box, Muller 1958,
doi:10.1214/aoms/1177706645; attacks on floating-point noise, Mironov 2012, doi:10.1145/2382196.2382264, on Gaussian
samplers, Jin et al. 2022, arXiv:2112.05307.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..sharding import collectives
from ..sharding.collectives import ALONE, Axis, Subject
from ..sharding.flat_buffer import FlatBuffer
from ..sharding.protocol import Piece
from . import prng

KEY = Subject("(key of the noise)")
KEY_BYTES = 32
BLOCK = {"cpu": 2**15}
"""Elements drawn at a time. On a CPU one thread takes them, so that bits do not depend on the number of threads."""
OTHER_BLOCK = 2**20
_ALIGNED = 64
"""Blocks begin and end at multiples of this: a CPU's vector instructions then leave no rest, whose bits may differ."""


@dataclass(frozen=True)
class Noise:
    """Noise under a 32-byte ``key``, equal on all ranks, or replicas drift apart. Made by ``seeded`` and ``secure``.

    ``key`` together with the step is the whole state. Whoever has it can subtract the noise: keep it out of logs.
    """

    key: bytes
    generator: Literal["philox", "chacha20"] = "philox"

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise ValueError(f"got a key of {len(self.key)} bytes, wanted {KEY_BYTES}: use seeded(...) or secure(...)")

    def __repr__(self) -> str:
        return f"Noise(key=<hidden>, generator={self.generator!r})"

    def standard_normal(
        self, name: str, step: int, start: int, stop: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """[stop - start] in ``dtype``: of elements start..stop-1 of the flattened parameter ``name`` at ``step``.

        Drawn in float64, rounded once. Any split of a range gives the bits of the whole. Raises ValueError unless
        0 <= start <= stop < 2^63 and 0 <= step < 2^63.
        """
        return self.normal(name, step, start, stop, 1.0, dtype, device)

    def normal(
        self, name: str, step: int, start: int, stop: int, deviation: float, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """[stop - start]: ``deviation`` times the standard normal in float64, rounded once to ``dtype``."""
        if not (0 <= start <= stop < 2**63 and 0 <= step < 2**63):
            raise ValueError(f"got elements {start} to {stop} of {name} at step {step}, wanted 0 <= start <= stop")
        drawn = torch.empty(stop - start, dtype=dtype, device=device)
        for first, last in _blocks(start, stop, BLOCK.get(device.type, OTHER_BLOCK)):
            block = box_muller(*self._words(name, step, first, last, device)) * deviation
            low, high = max(first, start), min(last, stop)
            drawn[low - start : high - start] = block[low - first : high - first]
        return drawn

    def uniform(self, name: str, step: int, start: int, stop: int, device: torch.device) -> Tensor:
        """[stop - start] float64, uniform on the multiples of 2^-53 in [0, 1), of those elements of ``name``."""
        drawn = torch.empty(stop - start, dtype=torch.float64, device=device)
        for first, last in _blocks(start, stop, BLOCK.get(device.type, OTHER_BLOCK)):
            high, low, *_ = self._words(name, step, first, last, device)
            block = _top53(high, low).double().mul(2.0**-53)
            lowest, highest = max(first, start), min(last, stop)
            drawn[lowest - start : highest - start] = block[lowest - first : highest - first]
        return drawn

    def add_(self, pieces: Iterable[Piece], step: int, deviation: float) -> None:
        """Add noise of standard ``deviation`` (noise multiplier * C / N) to the reduced gradients of ``pieces``.

        Call it once a step, after the last reduction, with ``model.pieces()``. No communication. Raises ValueError for
        a deviation that is negative or not finite, RuntimeError for a piece that has no gradient: it would be released
        without noise.
        """
        _check_deviation(deviation)
        pieces = list(pieces)
        missing = [piece.name for piece in pieces if piece.gradient is None]
        if missing:
            raise RuntimeError(f"no reduced gradient of {', '.join(missing)}: reduce gradients before adding noise")
        for piece in pieces:
            assert piece.gradient is not None
            stop = piece.start + piece.gradient.numel()
            kind = piece.gradient.dtype, piece.gradient.device
            piece.gradient.add_(self.normal(piece.name, step, piece.start, stop, deviation, *kind))

    def of_shard(self, buffer: FlatBuffer, step: int, deviation: float = 1.0) -> Tensor:
        """[s]: the noise of this rank's shard of ``buffer``, in its dtype; zeros on padding and if it is frozen."""
        _check_deviation(deviation)
        shard = torch.zeros_like(buffer.shard, requires_grad=False)
        offset = -buffer.start
        for position, name in enumerate(buffer.names if buffer.trainable else ()):
            part = buffer.owned(position)
            drawn = self.normal(name, step, part.start, part.stop, deviation, shard.dtype, shard.device)
            if part.stop > part.start:
                shard[offset + part.start : offset + part.stop] = drawn
            offset += buffer.sizes[position]
        return shard

    def _words(self, name: str, step: int, first: int, last: int, device: torch.device) -> list[Tensor]:
        """The four words [last - first] of each element."""
        if self.generator == "philox":
            return philox_words(subkey(self.key, name, 2), step, first, last, device)
        return chacha_words(subkey(self.key, name, 8), step, first, last, device)


def seeded(seed: int) -> Noise:
    """Reproducible noise for tests and studies; equal ``seed`` in [0, 2^256) on all ranks. Not for release of data."""
    if not 0 <= seed < 2 ** (8 * KEY_BYTES):
        raise ValueError(f"got seed {seed}, wanted 0 <= seed < 2^{8 * KEY_BYTES}")
    return Noise(seed.to_bytes(KEY_BYTES, "little"))


def secure(axis: Axis = ALONE, replicas: Axis = ALONE, device: torch.device | None = None) -> Noise:
    """Noise from ChaCha20 under a key that rank 0 takes from the operating system. All ranks call it together.

    The key travels in one all-reduce over each axis of more than one rank, to which every other rank adds zero; it has
    to lie on ``device`` where the group's backend wants it there.
    """
    first = axis.rank == 0 and replicas.rank == 0
    own = list(secrets.token_bytes(KEY_BYTES)) if first else [0] * KEY_BYTES
    shared = torch.tensor(own, dtype=torch.int64, device=device)
    for each in (axis, replicas):
        collectives.all_reduce_sum(KEY, shared, each)
    return Noise(bytes(shared.tolist()), "chacha20")


def subkey(key: bytes, name: str, count: int) -> list[int]:
    """``count`` 32-bit words for the parameter ``name``: keyed BLAKE2b of its UTF-8, little-endian; stable for ever.

    Two names of one model share 64-bit Philox keys with probability 2^-64.
    """
    digest = hashlib.blake2b(name.encode(), key=key, digest_size=4 * count).digest()
    return list(struct.unpack(f"<{count}I", digest))


def philox_words(key: list[int], step: int, first: int, last: int, device: torch.device) -> list[Tensor]:
    """Four words [last - first]; counter: element (64 bits), then step (64 bits)."""
    element = torch.arange(first, last, dtype=torch.int64, device=device)
    return prng.philox4x32([*prng.split(element), *prng.split(step)], key)


def chacha_words(key: list[int], step: int, first: int, last: int, device: torch.device) -> list[Tensor]:
    """Four words [last - first]; counter: element // 4, nonce: step. ``first`` and ``last`` are multiples of 4."""
    block = torch.arange(first // 4, last // 4, dtype=torch.int64, device=device)
    found = prng.chacha20([*prng.split(block), *prng.split(step)], key)
    of_elements_n4 = torch.stack(found, 1).reshape(-1, 4)
    return list(of_elements_n4.unbind(1))


def box_muller(w0: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """[n] float64: one Gaussian from four words [n]."""
    radius = (_top53(w0, w1) + 1).double().mul(2.0**-53).log().mul(-2.0).sqrt()
    angle = _top53(w2, w3).double().mul(2.0**-53).mul(2 * math.pi)
    return radius * angle.cos()


def _top53(high: Tensor, low: Tensor) -> Tensor:
    return (high << 21) | (low >> 11)


def _blocks(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Aligned (first, last) that cover start..stop-1; none of an empty range."""
    last = -(-stop // _ALIGNED) * _ALIGNED if stop > start else start
    for first in range(start - start % _ALIGNED, last, size):
        yield first, min(first + size, last)


def _check_deviation(deviation: float) -> None:
    if not 0 <= deviation < math.inf:
        raise ValueError(f"got a standard deviation of {deviation}, wanted a finite one that is not negative")
