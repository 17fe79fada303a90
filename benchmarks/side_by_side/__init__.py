"""Faults in Opacus and in ``fully_shard``: which are found by their own tests, by what people do today, and by laws."""
