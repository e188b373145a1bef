"""One training step by the real engine, on tensors without memory, in a world that is not there."""
