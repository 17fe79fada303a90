"""An adapter that breaks its protocol, named ``stepless.py:Stepless``: its trainer has no step."""

from __future__ import annotations

from fsdpcheck.adapter import Features


class Stepless:
    name, features = "stepless", Features(promises=frozenset({"plain"}))

    def build(self, model: object, setup: object) -> object:
        return object()
