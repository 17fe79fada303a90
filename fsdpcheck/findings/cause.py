"""Suspect: one known mistake that would have computed exactly what was got. What diagnoses say, and how it is put."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

EXACT, PATTERN, WEAK = 0, 1, 2
"""Strength: it computes what was got; it says where the wrong values stand; it fits because the case is too small."""

_AT_MOST = 2  # causes named at once: more name nothing


class Suspect(NamedTuple):
    """``key`` is the mistake, the same in every case; ``text`` says what it is in this case, with its numbers."""

    key: str
    text: str
    strength: int = EXACT


Suspects = Sequence[Suspect]
"""All suspicions that fit one case. None in its place means that the case cannot tell: it is no evidence."""


def named(suspects: Suspects | None) -> str:
    """The strongest suspicions, if one or two remain; "" for none or for more, which name nothing."""
    certain = [suspect for suspect in _distinct(suspects or ()) if suspect.strength < WEAK]
    strongest = min((suspect.strength for suspect in certain), default=WEAK)
    chosen = list(dict.fromkeys(suspect.text for suspect in certain if suspect.strength == strongest))
    return " or ".join(chosen) if len(chosen) <= _AT_MOST else ""


def common(first: Suspects | None, others: Iterable[Suspects | None]) -> list[Suspect]:
    """The suspicions that fit every case that can tell, each in the words of the first case in which it stands.

    Each as strong as in the case where it is strongest: one case that is large enough speaks for the others. Where none
    fits all, those that fit most, if at most one case in five speaks against them: a mistake may show in two ways.
    """
    told = [{suspect.key: suspect for suspect in _distinct(own)} for own in (first, *others) if own is not None]
    words: dict[str, Suspect] = {}
    for own in told:
        for key, suspect in own.items():
            words[key] = suspect._replace(strength=min(suspect.strength, words.get(key, suspect).strength),
                                          text=words.get(key, suspect).text)  # fmt: skip
    against = {key: sum(_speaks_against(own, suspect) for own in told) for key, suspect in words.items()}
    support = {key: sum(key in own for own in told) for key in words}
    best = max((support[key] - _WEIGHT * against[key] for key in words), default=0)
    full = [suspect for key, suspect in words.items() if len(told) == 1 or (not against[key] and support[key] > 1)]
    if full:
        most = max(support[suspect.key] for suspect in full)
        return [suspect for suspect in full if 2 * support[suspect.key] > most]
    return [suspect for key, suspect in words.items() if best > 0 and support[key] - _WEIGHT * against[key] == best]


_WEIGHT = 4  # cases in favour that outweigh one against


def _speaks_against(own: dict[str, Suspect], suspect: Suspect) -> bool:
    """Whether a case can tell, and does not show ``suspect``. Where values stand says nothing against a computation."""
    if suspect.key in own:
        return False
    return suspect.strength == PATTERN or not own or any(each.strength != PATTERN for each in own.values())


def _distinct(suspects: Suspects) -> Iterable[Suspect]:
    """One suspect a key: the strongest, else the first."""
    kept: dict[str, Suspect] = {}
    for suspect in suspects:
        if suspect.key not in kept or suspect.strength < kept[suspect.key].strength:
            kept[suspect.key] = suspect
    return kept.values()
