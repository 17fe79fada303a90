"""Parts of simulated and of real ranks: what is recorded, patched and noticed on each."""
