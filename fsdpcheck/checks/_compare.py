"""Comparing tensors by their bits, and saying where they differ. Used by the checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from fsdpcheck.findings.cause import Cause, Causes
from fsdpcheck.findings.violation import Diagnose, Violation
from fsdpcheck.workload.clip_groups import INSTRUMENT


def unknown() -> None:
    """The diagnosis of a difference that nothing is known about."""


def differing(got: Tensor, wanted: Tensor) -> Tensor:
    """Mask of the elements whose values differ, NaN against a number included; zeros of either sign are equal.

    NaN equals NaN, whatever its payload. Shapes must agree.
    """
    return ~((got == wanted) | (got.isnan() & wanted.isnan()))


def alike(got: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether both are missing, or equal in dtype, shape and bits."""
    if got is None or wanted is None:
        return got is wanted
    same_form = got.dtype == wanted.dtype and got.shape == wanted.shape
    return same_form and not bool(differing(got, wanted).any())


def require_equal(
    what: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str, cause: Diagnose
) -> None:
    """Raise Violation at the first element of the first tensor that differs; ``cause`` can be asked then."""
    require_same_form(what, got, wanted, where)
    wrong = {name: mask for name in wanted if bool((mask := differing(got[name], wanted[name])).any())}
    require_none(what, got, wanted, wrong, where, cause)


def require_none(
    what: str,
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    wrong: Mapping[str, Tensor],
    where: str,
    cause: Diagnose,
) -> None:
    """Raise Violation for the first marked element of ``wrong``, masks by name; return if there are none."""
    if not wrong:
        return
    name, mask = next(iter(wrong.items()))
    index = first_index(mask)
    count = f"{int(mask.sum())} of {mask.numel()} elements differ, in {len(wrong)} of {len(wanted)} tensors"
    if name == INSTRUMENT:
        count += f"; {name} is of the harness's own gauge layer, the last parameter of every model"
    raise Violation(
        what,
        got=number(got[name][index]),
        wanted=number(wanted[name][index]),
        where=f"{where}, {name}{list(index) if index else ''}; {count}",
        cause=cause,
    )


def require_same_form(what: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """Raise Violation unless both have the same names, and each tensor the same shape and dtype."""
    if got.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
        raise Violation(what, got=f"missing {missing}, extra {extra}", wanted=f"{sorted(wanted)}", where=where,
                        cause=partial(_of_names, got, wanted))  # fmt: skip
    for name, value in wanted.items():
        if got[name].shape != value.shape or got[name].dtype != value.dtype:
            raise Violation(what, got=form(got[name]), wanted=form(value), where=f"{where}, {name}")


def _of_names(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Causes:
    """Whether each name too many has what another has."""
    again = {
        name: [other for other in wanted if alike(got.get(other), got[name])] for name in got if name not in wanted
    }
    if not again or not all(again.values()):
        return []
    told = "; ".join(f"{name} is {others[0]} once more" for name, others in sorted(again.items()))
    return [Cause("named twice", f"{told}: a tied (shared) parameter stands under each of its names")]


def require_equal_rows(
    what: str, got: Tensor, wanted: Tensor, samples: Sequence[int], where: str, cause: Diagnose
) -> None:
    """Raise Violation at the first sample whose value [b] differs."""
    require_row_form(what, got, wanted, where)
    require_no_row(what, got, wanted, differing(got, wanted), samples, where, cause)


def require_row_form(what: str, got: Tensor, wanted: Tensor, where: str) -> None:
    """Raise Violation unless there is one value of the right dtype for each local sample."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise Violation(what, got=form(got), wanted=form(wanted), where=where)


def require_no_row(
    what: str, got: Tensor, wanted: Tensor, wrong: Tensor, samples: Sequence[int], where: str, cause: Diagnose
) -> None:
    """Raise Violation for the first marked sample of ``wrong`` [b]; return if there is none."""
    if not bool(wrong.any()):
        return
    place = int(wrong.nonzero()[0])
    raise Violation(
        what,
        got=number(got[place]),
        wanted=number(wanted[place]),
        where=f"{where}, sample {samples[place]} (local {place}); {int(wrong.sum())} of {len(wrong)} samples differ",
        cause=cause,
    )


def first_apart(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first position at which two sequences differ, which may be the end of the shorter; None if they are equal."""
    if one == other:
        return None
    unequal = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))


def first_index(mask: Tensor) -> tuple[int, ...]:
    """Index of the first marked element."""
    return tuple(int(i) for i in mask.nonzero()[0])


def form(tensor: Tensor) -> str:
    """dtype and shape, as text."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def number(value: Tensor | float) -> str:
    """A number with all its digits."""
    return repr(float(value))
