"""Paired ratios against peers, measured in one run: ``python -m benchmarks``. Never absolute times, never a gate."""
