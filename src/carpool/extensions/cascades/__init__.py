"""Decides whether a cascade of two models is worth it, and from which certainty on the cheap one answers."""
