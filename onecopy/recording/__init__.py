"""Records what a run does: where its time, its bytes and its memory go, and what it was told."""
