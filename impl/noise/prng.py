"""Pseudo-random 32-bit words as functions of a key and a counter, vectorised in plain torch.

Words are int64 tensors (or Python ints) with values in [0, 2^32), equal on every device: every intermediate value stays
below 2^63, so nothing depends on how a device wraps integers.

* ``philox4x32``: ten rounds of Philox4x32. Fast and statistically sound; *not* cryptographically secure.
* ``chacha20``: the ChaCha20 block function, a stream that is cryptographically secure under a secret random key.

Sources: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405,
and its library Random123; RFC 8439, sections 2.1 to 2.3, with ChaCha's original 64-bit counter and 64-bit nonce.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

Word = Tensor | int

MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)


def philox4x32(counter: Sequence[Word], key: Sequence[int]) -> list[Word]:
    """The 4 words of 4 ``counter`` words under 2 ``key`` words: Philox4x32-10."""
    c0, c1, c2, c3 = counter
    for number in range(_ROUNDS):
        k0, k1 = ((word + number * weyl) & MASK for word, weyl in zip(key, _WEYL, strict=True))
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


def chacha20(counter: Sequence[Word], key: Sequence[int]) -> list[Word]:
    """The 16 words of 4 ``counter`` words (counter and nonce, low word first) under 8 ``key`` words."""
    start: list[Word] = [*_CONSTANTS, *key, *counter]
    state = list(start)
    for _ in range(10):
        for quarter in _QUARTERS:
            _quarter_round(state, *quarter)
    return [(word + first) & MASK for word, first in zip(state, start, strict=True)]


def split(number: Word) -> tuple[Word, Word]:
    """(low, high) words of a number below 2^63."""
    return number & MASK, number >> 32


def _product(constant: int, word: Word) -> tuple[Word, Word]:
    """(high, low) words of constant * word, from halves of ``word``: no intermediate value reaches 2^50."""
    low, high = constant * (word & 0xFFFF), constant * (word >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & MASK


def _quarter_round(state: list[Word], a: int, b: int, c: int, d: int) -> None:
    for one, other, changed, distance in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[one] = (state[one] + state[other]) & MASK
        mixed = state[changed] ^ state[one]
        state[changed] = ((mixed << distance) & MASK) | (mixed >> (32 - distance))
