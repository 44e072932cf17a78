"""Front ends: they translate between a wire protocol and the engine's one door, and decide nothing."""
