"""Pseudo-random 32-bit words as functions of a key and a counter, vectorised in plain torch.

Words are int64 tensors with values in [0, 2^32), equal on every device: every intermediate value stays below 2^63, so
nothing depends on how a device wraps integers. What a round does alike to several words is done to them together, in
the rows of one tensor: noise is most often drawn of few elements, where an operator costs what it costs.

* ``philox4x32``: ten rounds of Philox4x32. Fast and statistically sound; *not* cryptographically secure.
* ``chacha20``: the ChaCha20 block function, a stream that is cryptographically secure under a secret random key.

Sources: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", doi:10.1145/2063384.2063405,
and its library Random123; RFC 8439, sections 2.1 to 2.3, with ChaCha's original 64-bit counter and 64-bit nonce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

Word = Tensor | int

MASK: Final = 0xFFFFFFFF
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_WEYL: Final = (0x9E3779B9, 0xBB67AE85)
_ROUNDS: Final = 10
_CONSTANTS: Final = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"


def philox4x32(counter: Sequence[Word], key: Sequence[int]) -> list[Tensor]:
    """The 4 words [n] of 4 ``counter`` words, tensors [n] or numbers, under 2 ``key`` words: Philox4x32-10."""
    c0, c1, c2, c3 = _broadcast(counter)
    even, odd = torch.stack([c0, c2]), torch.stack([c3, c1])  # every round exchanges the rows
    keys = [[(word + number * weyl) & MASK for word, weyl in zip(key, _WEYL, strict=True)] for number in range(_ROUNDS)]
    in_turn = even.new_tensor([words if number % 2 else words[::-1] for number, words in enumerate(keys)]).unsqueeze(2)
    constants = even.new_tensor([_MULTIPLIERS, _MULTIPLIERS[::-1]]).unsqueeze(2)
    for number in range(_ROUNDS):
        high, low = _product(even, constants[number % 2])
        even, odd = high.bitwise_xor_(odd).bitwise_xor_(in_turn[number]), low.flip(0)
    return [even[0], odd[1], even[1], odd[0]]


def chacha20(counter: Sequence[Word], key: Sequence[int]) -> list[Tensor]:
    """The 16 words [n] of 4 ``counter`` words (counter and nonce, low word first) under 8 ``key`` words."""
    start = torch.stack(_broadcast([*_CONSTANTS, *key, *counter]))
    a, b, c, d = start.clone().view(4, 4, -1)
    for _ in range(10):
        _quarter_rounds(a, b, c, d)  # of the columns
        b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
        _quarter_rounds(a, b, c, d)  # of the diagonals
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return list(torch.cat([a, b, c, d]).add_(start).bitwise_and_(MASK))


def split(number: Word) -> tuple[Word, Word]:
    """(low, high) words of a number below 2^63."""
    return number & MASK, number >> 32


def _broadcast(words: Sequence[Word]) -> list[Tensor]:
    """All of them [n], where the tensors among them are."""
    device = next((word.device for word in words if isinstance(word, Tensor)), None)
    numbers = iter(torch.tensor([word for word in words if not isinstance(word, Tensor)], device=device).unsqueeze(1))
    tensors = (word if isinstance(word, Tensor) else next(numbers) for word in words)
    return list(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


def _product(words: Tensor, constants: Tensor) -> tuple[Tensor, Tensor]:
    """(high, low) words of each product, of halves of ``words``, which it overwrites: none of them reaches 2^50."""
    low = (words & 0xFFFF).mul_(constants)
    high = words.bitwise_right_shift_(16).mul_(constants)
    high += low >> 16
    low.bitwise_and_(0xFFFF).add_((high & 0xFFFF).bitwise_left_shift_(16))
    return high.bitwise_right_shift_(16), low


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
    """Four quarter rounds at once, in place: each takes a row of each of these [4, n]."""
    for one, other, changed, distance in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        one.add_(other).bitwise_and_(MASK)
        high = changed.bitwise_xor_(one) >> (32 - distance)
        changed.bitwise_left_shift_(distance).bitwise_and_(MASK).bitwise_or_(high)
