"""Dropout is off: what one rank draws for its whole batch, ranks that each have a part of it cannot draw."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from fsdpcheck.comparison.precision import notes
from fsdpcheck.compat import tensors_private


def switched_off() -> AbstractContextManager[None]:
    """While open, no thread in an arithmetic drops anything; where one would have, that is noted."""
    return tensors_private.dropouts_replaced(_simple, _attention, _recurrent)


def _simple(real: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``torch.dropout`` and its kin: (input, p, training)."""

    @functools.wraps(real)
    def dropped(input: Any, p: float, train: bool) -> Any:
        if not (train and p and notes.are_taken()):
            return real(input, p, train)
        notes.note("dropout is off")
        if real.__name__ == "native_dropout":  # which gives its mask as well
            return real(input, p, False)
        return input if real.__name__.endswith("_") else input.clone()  # which the script may change

    return dropped


def _attention(real: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``scaled_dot_product_attention``: (query, key, value, mask, p, ...)."""

    @functools.wraps(real)
    def attended(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **options: Any
    ) -> Any:
        if dropout_p and notes.are_taken():
            notes.note("dropout is off")
            dropout_p = 0.0
        return real(query, key, value, attn_mask, dropout_p, *args, **options)

    return attended


def _recurrent(real: Callable[..., Any]) -> Callable[..., Any]:
    """Of ``torch.lstm`` and its kin, whose dropout stands before two flags, or before one."""

    @functools.wraps(real)
    def run(*args: Any, **options: Any) -> Any:
        place = next((number for number, value in enumerate(args) if type(value) is float), None)
        if place is None or not args[place] or not notes.are_taken():
            return real(*args, **options)
        if args[place + 1]:  # training
            notes.note("dropout is off")
        return real(*args[:place], 0.0, *args[place + 1 :], **options)

    return run
