"""The page of a report: HTML with all in it that it needs, drawn from kept sessions."""

from __future__ import annotations

import importlib.util

from fsdpcheck.errors import MissingDependency, explain


def require_jinja() -> None:
    """Raise MissingDependency where pages cannot be made."""
    if importlib.util.find_spec("jinja2") is None:
        then = "pip install 'fsdpcheck[html]', or pip install jinja2"
        raise MissingDependency(explain("a page needs jinja2", got="it is not installed", then=then))
