"""Real ranks: gloo processes on loopback, started, watched and ended."""
