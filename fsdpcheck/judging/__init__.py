"""Judging: a law, the cases that are explored for it, and the verdict. ``check.check_law`` is the way in."""
