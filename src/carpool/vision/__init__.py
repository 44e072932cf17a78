"""Leads from bytes to a model's input, and from its outputs to answers in the picture's own pixels."""
