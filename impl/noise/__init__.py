"""Noise by parameter, element and step, from counter-based generators."""
