"""Simulated ranks: W threads of one process, one running at a time, that meet in memory."""
