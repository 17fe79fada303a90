"""Pictures as data: shapes of an SVG, which the template draws, so that every text in them is escaped there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

Tag = Literal["rect", "line", "path", "text", "circle"]

CHARACTER: Final = 7.3
"""Width of a character of the small monospaced type, in the units of pictures."""


@dataclass(frozen=True)
class Shape:
    """One element. ``told``: what a pointer or a reader of the screen is told of it; ``text``: of a "text"."""

    tag: Tag
    attributes: dict[str, str | float]
    text: str = ""
    told: str = ""


@dataclass
class Picture:
    """``title`` and ``told`` say in words what it shows. ``height`` and ``width`` grow with what is put in."""

    title: str
    told: str = ""
    width: float = 0
    height: float = 0
    shapes: list[Shape] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, look: str, told: str = "", radius: float = 3
    ) -> None:
        """A box; ``look`` is its class in page.css."""
        self._room(x + width, y + height)
        where: dict[str, str | float] = {"x": x, "y": y, "width": width, "height": height, "rx": radius, "class": look}
        self.shapes.append(Shape("rect", where, told=told))

    def text(self, x: float, y: float, text: str, look: str = "", anchor: str = "start", told: str = "") -> None:
        """One line of text on the baseline ``y``; ``anchor``: "start", "middle" or "end" at ``x``."""
        wide = CHARACTER * len(text)
        self._room(x + {"start": wide, "middle": wide / 2}.get(anchor, 0), y + 4)
        where: dict[str, str | float] = {"x": x, "y": y, "class": f"t {look}".strip(), "text-anchor": anchor}
        self.shapes.append(Shape("text", where, text, told))

    def line(self, x1: float, y1: float, x2: float, y2: float, look: str) -> None:
        """A line."""
        self._room(max(x1, x2), max(y1, y2))
        self.shapes.append(Shape("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "class": look}))

    def circle(self, x: float, y: float, radius: float, look: str, told: str = "") -> None:
        """A dot."""
        self._room(x + radius, y + radius)
        self.shapes.append(Shape("circle", {"cx": x, "cy": y, "r": radius, "class": look}, told=told))

    def path(self, points: Iterable[tuple[float, float]], look: str) -> None:
        """An open line through points."""
        listed = [*points]
        self._room(max(x for x, _ in listed), max(y for _, y in listed))
        way = " L".join(f"{x:g} {y:g}" for x, y in listed)
        self.shapes.append(Shape("path", {"d": f"M{way}", "class": look}))

    def _room(self, right: float, below: float) -> None:
        self.width, self.height = max(self.width, right + 1), max(self.height, below + 1)


def cut(text: str, most: int) -> str:
    """``text`` in ``most`` characters, its middle left away where it is longer."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
