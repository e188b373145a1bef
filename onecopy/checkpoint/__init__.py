"""Checkpoints: states in logical coordinates, for any number of ranks."""
