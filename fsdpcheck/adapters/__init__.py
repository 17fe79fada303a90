"""Implementations under test, one a file; found by scanning this folder or by dotted name."""
