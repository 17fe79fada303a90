"""The reference implementation: flat-parameter sharding with ghost clipping, written to be read."""
