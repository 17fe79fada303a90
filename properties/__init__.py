"""The laws: one law a function, one chapter a file."""
