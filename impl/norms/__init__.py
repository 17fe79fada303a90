"""Norm rules: per-sample squared gradient norms from activations and backprops, one layer type a file."""
