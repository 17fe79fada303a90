"""What a run of a script shows without a word from it: each rank's observer, and whole tensors put together."""
