"""Processes that checks start: how much processor time they may use, and that nothing of them is left behind."""
