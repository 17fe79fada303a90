"""Forty-eight pairs over all classes, written when the others were known: fixed before fsdpcheck ran any of them."""
