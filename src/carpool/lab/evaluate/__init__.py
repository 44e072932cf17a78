"""Measures how good a model is on labelled pictures, and whether another version is worse."""
