"""Serves the versions that a model registry names, and follows its aliases."""
