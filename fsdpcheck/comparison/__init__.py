"""Compare: an unmodified training script on W ranks against the same script on one, without a tolerance."""
