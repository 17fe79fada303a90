"""Simulated ranks: threads of one process under a deterministic scheduler."""
