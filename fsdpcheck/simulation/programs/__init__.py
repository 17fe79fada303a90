"""Programs that know nothing of simulated ranks: their modules, streams and exit handlers, and how they start."""
