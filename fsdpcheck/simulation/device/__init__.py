"""A model of a GPU's streams, events and caching allocator, and what breaks their order (docs/streams.md)."""
