"""The documentation site, from docs/*.md as they stand: ``tox run -e docs``, or ``sphinx-build -W docs OUT``."""

from __future__ import annotations

import re
from pathlib import Path

_PYPROJECT = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
(version,) = re.findall(r'^version = "(.+)"$', _PYPROJECT, re.MULTILINE)

project = "fsdpcheck"
copyright = "the fsdpcheck maintainers, Apache-2.0"  # Sphinx' name for it
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["README.md"]  # index.md has what it says
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "imported-members": True}
html_theme = "furo"
html_title = f"fsdpcheck {version}"
html_theme_options = {"navigation_with_keys": True}
html_show_sphinx = False
