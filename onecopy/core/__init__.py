"""One training step: layout, stages, units, schedule, hooks and the optimizer on owned slices."""
