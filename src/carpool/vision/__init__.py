"""Makes a model's input from bytes, and answers in the picture's own pixels from its outputs."""
