"""In which arithmetic a script computes: its own, float64 in place of it, either with noise."""
