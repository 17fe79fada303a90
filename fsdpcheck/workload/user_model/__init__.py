"""A user's own model: loaded, inspected, cut into units, drawn into cases, and the roundings of its true functions."""
