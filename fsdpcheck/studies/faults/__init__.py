"""Faults put to laws: planted ones, a user's own, and mutants of an implementation's source; which law kills which."""
