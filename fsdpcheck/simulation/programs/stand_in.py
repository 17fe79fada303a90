"""Classes that stand in for those of torch: another way to be made, and for ``isinstance`` the same class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsdpcheck.compat.torch_private import replaced


class _StandIn(type):
    """The class of stand-ins; ``make`` makes their objects, which are of one of the ``kinds``."""

    make: Callable[..., Any]
    kinds: tuple[type, ...]

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return cls.make(*args, **options)

    def __instancecheck__(cls, thing: Any) -> bool:
        return isinstance(thing, cls.kinds)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.kinds)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kinds[0], name)


def stand_in(real: type, make: Callable[..., Any], *kinds: type) -> type:
    """A class of which ``make(...)`` makes the objects, of ``real`` or of ``kinds``."""
    inner = {"make": staticmethod(make), "kinds": (real, *kinds), "__module__": real.__module__}
    return _StandIn(real.__name__, (), inner)


@contextmanager
def standing_in(owner: Any, name: str, make: Callable[..., Any], *kinds: type) -> Iterator[None]:
    """While open, one stands in for ``owner.name``."""
    with replaced(owner, **{name: stand_in(getattr(owner, name), make, *kinds)}):
        yield
