"""Models that run in the runner, as the engine holds them."""
