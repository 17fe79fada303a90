"""An arithmetic, entered on the thread of a rank round its script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpcheck.comparison.precision import choices, notes, randomness
from fsdpcheck.comparison.precision.arithmetic import Arithmetic
from fsdpcheck.comparison.precision.choices import Choices
from fsdpcheck.comparison.precision.exactness import Exactness
from fsdpcheck.comparison.precision.higher_precision import Raised
from fsdpcheck.comparison.precision.noise import Noise
from fsdpcheck.comparison.precision.operators import Operator, operator
from fsdpcheck.comparison.precision.tables import SCALER
from fsdpcheck.compat import tensors_private
from fsdpcheck.compat.dispatch_private import undispatched


@contextmanager
def in_arithmetic(
    arithmetic: Arithmetic, counted: Counter[str], rank: int, exactness: Exactness | None = None
) -> Iterator[Choices | None]:
    """While open, this thread computes in that arithmetic, without dropout; notes of it are counted there.

    Guarantee: in the script's own arithmetic without noise, every bit is what it is without this, but for dropout.
    ``exactness``: of this rank, where draws are rounded to few bits; operators are proved in float64 without noise.
    ``counted``: a sentence with file:line each. Where the script fails and its error speaks of types, that is noted.
    To be opened within ``entrances.installed()``. Gives what operators choose, where raised.
    """
    raised = arithmetic.precision == "float64"
    noise = None if arithmetic.noise is None else Noise(arithmetic.noise)
    made = Choices() if raised else None
    with notes.taken(counted, raised=raised, batch_statistics=arithmetic.batch_statistics):
        try:
            with ArithmeticMode(Raised() if raised else None, noise, made, exactness):
                yield made
        except Exception as error:
            if raised:
                notes.note_refusal(error)
            raise


class ArithmeticMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators of one thread, raised, with noise, or looked at."""

    supports_higher_order_operators = True

    def __init__(
        self,
        raised: Raised | None,
        noise: Noise | None,
        choices: Choices | None = None,
        exactness: Exactness | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._raised, self._noise, self._choices = raised, noise, choices
        self._exactness = exactness
        self._call = _call if noise is None else self._noisy
        if exactness is not None:
            if raised is not None and noise is None:
                self._call = self._proved
            else:
                exactness.end("nothing is proved here")

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call = self._call
        if types:
            if any(tensors_private.unwraps_itself(kind) for kind in types):
                return NotImplemented  # comes back as operations of what the tensors wrap
            if any(tensors_private.is_fake(kind) for kind in types):
                call = _call  # it has no values
        if not isinstance(func, OpOverload):
            return self._of_higher_order(func, args, kwargs or {})
        known = operator(func)
        if known.base in randomness.SEEN:
            randomness.see(known, args, kwargs or {})
        kwargs, raised = kwargs or {}, self._raised
        result = call(known, args, kwargs) if raised is None else raised.result(known, args, kwargs, call)
        if self._choices is not None and known.base in choices.SEEN and call is self._call:
            self._choices.see(known, args, result)
        if self._exactness is not None:
            if known.rounding == "draw":
                self._exactness.drawn(known, args, kwargs, result)
            elif known.base in SCALER:
                self._exactness.end(known.name)  # higher_precision.py calls it by itself
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while a mode is entered (entrances.py); torch would look so at each operator. 2.13.0."""
        return False

    def _of_higher_order(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that calls functions, such as that of flex_attention, whose operators no mode sees."""
        notes.note(f"operators within {func} are not seen")
        result = func(*args, **kwargs)
        if self._exactness is not None:
            self._exactness.end(str(func))
        if self._noise is not None:
            with undispatched():
                self._noise.shake(result, len(args))
        return result

    def _proved(self, known: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        exactness = self._exactness
        assert exactness is not None
        exactness.before(known, args, kwargs)
        result = known.func(*args, **kwargs)
        if known.rounding == "constant":
            exactness.made(known, result)
        return result

    def _noisy(self, known: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        noise, rounding = self._noise, known.rounding
        assert noise is not None
        if rounding == "reduction":
            with undispatched():
                args = noise.inputs(known, args)
        result = known.func(*args, **kwargs)
        if rounding in ("rounding", "reduction") or (rounding != "communication" and _rounds(known, args, result)):
            with undispatched():
                noise.results(known, args, result)
        return result


def _call(known: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return known.func(*args, **kwargs)


def _rounds(known: Operator, args: tuple[Any, ...], result: Any) -> bool:
    """Whether this call rounds, of an operator that need not."""
    if known.accumulates is not None:
        return len(args) > known.accumulates and bool(args[known.accumulates])
    if known.rounding != "cast":
        return False
    given = [torch.finfo(value.dtype).eps for value in _flat(args) if value.is_floating_point()]
    results = args[:1] if result is None else (result,)
    made = [torch.finfo(value.dtype).eps for value in _flat(results) if value.is_floating_point()]
    return max(made, default=0.0) > min(given, default=1.0)


def _flat(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)
