"""The pairs of programs, a class of bugs or a few a module."""
