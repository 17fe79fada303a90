"""Samplers: Poisson sampling, and epochs dealt out to the ranks."""
