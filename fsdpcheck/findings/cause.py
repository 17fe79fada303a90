"""Cause: one known mistake that would have computed exactly what was got, and how it is worded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

EXACT, PATTERN, WEAK = 0, 1, 2
"""Strength: it computes what was got; it says where the wrong values stand; it fits because the case is too small."""

DID_NOT_MOVE = "did not move"
"""Key of a cause: parameters have not moved in an update. Behind a wrong gradient that is a consequence."""

OF_UPDATES = "update: "
"""What the key of a cause begins with that is of an update alone: behind a quantity that is wrong before it is none."""

_AT_MOST = 2  # causes named at once: more name nothing


class Cause(NamedTuple):
    """``key`` is the mistake, the same in every case; ``text`` says what it is in this case, with its numbers."""

    key: str
    text: str
    strength: int = EXACT


Causes = Sequence[Cause]
"""All causes that fit one case. None in its place means that the case cannot tell: it is no evidence."""


def named(causes: Causes | None) -> str:
    """The strongest causes, if one or two remain; "" for none or for more, which name nothing."""
    certain = [cause for cause in _distinct(causes or ()) if cause.strength < WEAK]
    strongest = min((cause.strength for cause in certain), default=WEAK)
    chosen = list(dict.fromkeys(cause.text for cause in certain if cause.strength == strongest))
    return " or ".join(chosen) if len(chosen) <= _AT_MOST else ""


def common(first: Causes | None, others: Iterable[Causes | None], apart: Iterable[Causes | None] = ()) -> list[Cause]:
    """The causes that fit every case that can tell, each in the words of the first case in which it stands.

    Each as strong as in the case where it is strongest: one case that is large enough speaks for the others. Where none
    fits all, those that fit most, if at most one case in five speaks against them: a mistake may show in two ways.
    ``apart`` are causes of cases that fail although they are as the first case is where it holds.
    Where all together name nothing, those of the first case are looked at without the cases of another mistake: such as
    are apart, and two at least with a cause that computes what was got and that the first case does not have.
    """
    told = [{cause.key: cause for cause in _distinct(own)} for own in (first, *others) if own is not None]
    elsewhere = [{cause.key: cause for cause in _distinct(own)} for own in apart if own is not None]
    words = _words([*told, *elsewhere])
    causes = _fitting([*told, *elsewhere], words)
    if named(causes) or not first:
        return causes
    own, *rest = told
    left = [own, *(each for each in rest if not _of_another(each, own, [*rest, *elsewhere], words))]
    kept = _fitting(left, {key: words[key] for key in own}) if len(left) > 1 else []
    return kept if named(kept) else causes


def _words(told: Iterable[dict[str, Cause]]) -> dict[str, Cause]:
    """Each cause as it is worded first, and as strong as it is anywhere."""
    words: dict[str, Cause] = {}
    for own in told:
        for key, cause in own.items():
            words[key] = cause._replace(strength=min(cause.strength, words.get(key, cause).strength),
                                          text=words.get(key, cause).text)  # fmt: skip
    return words


def _fitting(told: Sequence[dict[str, Cause]], words: dict[str, Cause]) -> list[Cause]:
    """Those of ``words`` that fit all of ``told``, or most of them."""
    against = {key: sum(_speaks_against(own, cause) for own in told) for key, cause in words.items()}
    support = {key: sum(key in own for own in told) for key in words}
    best = max((support[key] - _WEIGHT * against[key] for key in words), default=0)
    full = [cause for key, cause in words.items() if len(told) == 1 or (not against[key] and support[key] > 1)]
    if full:
        most = max(support[cause.key] for cause in full)
        return [cause for cause in full if 2 * support[cause.key] > most]
    return [cause for key, cause in words.items() if best > 0 and support[key] - _WEIGHT * against[key] == best]


def _of_another(
    case: dict[str, Cause], own: dict[str, Cause], rest: Sequence[dict[str, Cause]], words: dict[str, Cause]
) -> bool:
    """Whether ``case`` has a cause that computes what was got, as a further one has too, and none that ``own`` has."""
    if any(words[key].strength == EXACT for key in case.keys() & own.keys()):
        return False
    exact = [key for key, cause in case.items() if cause.strength == EXACT]
    return any(sum(key in each and each[key].strength == EXACT for each in rest) > 1 for key in exact)


_WEIGHT = 4  # cases in favour that outweigh one against


def _speaks_against(own: dict[str, Cause], cause: Cause) -> bool:
    """Whether a case can tell, and does not show ``cause``. Where values stand says nothing against a computation."""
    if cause.key in own:
        return False
    return cause.strength == PATTERN or not own or any(each.strength != PATTERN for each in own.values())


def _distinct(causes: Causes) -> Iterable[Cause]:
    """One cause a key: the strongest, else the first."""
    kept: dict[str, Cause] = {}
    for cause in causes:
        if cause.key not in kept or cause.strength < kept[cause.key].strength:
            kept[cause.key] = cause
    return kept.values()
