"""Traces as files: Chrome's trace events and Flight-Recorder dumps, written and read, and what is wrong in them."""
