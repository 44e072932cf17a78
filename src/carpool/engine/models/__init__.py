"""Implements the models of an engine: loaded, placed, replaced and taken away."""
