"""Laws that a user's own code has registered in this process, by name: whoever only runs ranks reports them."""

from __future__ import annotations

laws: list[str] = []
