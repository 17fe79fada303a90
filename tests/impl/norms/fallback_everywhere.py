"""The reference with the fallback in place of every norm rule, on cases whose functions are torch's own.

Not on surrogates: they replace kernels, and under ``vmap`` torch takes some backward kernels apart before they are met.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest

from fsdpcheck.adapters.builtin.reference import Reference
from fsdpcheck.impl import norms


class FallbackOnly(Reference):
    """The reference without surrogates."""

    features = replace(Reference.features, accepts=Reference.features.accepts - {"surrogates", "bags-private"})


adapter = FallbackOnly()


@dataclass
class Asked:
    """``hits``: how many layers have asked for a rule."""

    hits: int = 0


@contextmanager
def installed() -> Iterator[Asked]:
    """No layer type has a rule."""
    asked = Asked()

    def no_rule(module: object) -> None:
        asked.hits += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "rule_for", no_rule)
        yield asked
