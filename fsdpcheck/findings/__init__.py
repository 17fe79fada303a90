"""Findings: what broke (violation), why (cause), what is said of a law (verdict), and how it is replayed (tokens)."""
