"""What a training run will need, before it is started: closed formulas, free of torch."""
