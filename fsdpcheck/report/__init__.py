"""How results are shown and written."""
