"""Forty-eight pairs over all classes, written when the others were known well: fixed before fsdpcheck had run any of them."""
