"""Declaration: what an implementation says of itself, as plain data, for who judges it and must not import it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdpcheck.adapters.contract import Adapter, Features


@dataclass(frozen=True)
class Declaration:
    """``name`` and ``features`` as the adapter had them when it was loaded. ``laws``: names of laws that its import
    registered. ``files`` and ``packages``: what its process had loaded by then (see loading/provenance.py)."""

    name: str
    features: Features
    laws: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)


def declaration_of(adapter: Adapter, features: Features) -> Declaration:
    """The declaration of a loaded adapter. ``features`` may be of a class of its own, of which the fields are taken."""
    fields = {one.name: getattr(features, one.name) for one in dataclasses.fields(Features)}
    return Declaration(adapter.name, Features(**{**fields, "reasons": dict(features.reasons)}))
