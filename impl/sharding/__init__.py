"""Sharding: flat buffers or ``fully_shard``, and the messages between ranks."""
