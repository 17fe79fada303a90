"""The page of a matrix of faults: one HTML file with its style in it, no script, and nothing from the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from fsdpcheck import __version__
from fsdpcheck.report import faults
from fsdpcheck.report.page import page
from fsdpcheck.studies.faults.matrix import OUTCOMES, Outcome, Row

_ORDER: Final[tuple[Outcome, ...]] = (
    "survived", "changes nothing", "never ran", "not asked", "raises at once", "killed",
)  # fmt: skip


def text(rows: Sequence[Row], equivalent: Mapping[str, str]) -> str:
    """The page. Whatever a fault says is escaped by the template."""
    left = [row for row in rows if row.outcome == "survived" and row.fault not in equivalent]
    groups = [
        {
            "id": outcome.replace(" ", "-"), "outcome": outcome, "means": OUTCOMES[outcome],
            "open": outcome == "survived",
            "rows": [row for row in rows if row.outcome == outcome],
        }
        for outcome in _ORDER
    ]  # fmt: skip
    style = page.read("page.css").replace("ADAPTERS", "1")
    known = {
        "release": __version__,
        "style": style,
        "policy": f"default-src 'none'; style-src {page.hash_of(style)}; base-uri 'none'",
        "head": f"{len(left)} of {len(rows)} faults survive" if left else f"No fault of {len(rows)} survives",
        "look": "bad" if left else "good",
        "summary": faults.summary(rows, equivalent),
        "groups": [group for group in groups if group["rows"]],
        "equivalent": defaultdict(str, equivalent),
        "laws": faults.kills_by_law(rows),
    }
    return page.environment().get_template("faults.html.jinja").render(known)
