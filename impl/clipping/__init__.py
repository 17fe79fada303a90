"""Clipping: norms of samples from one backward, clip factors, and gradients re-weighted by them."""
