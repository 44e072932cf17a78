"""Answers one picture with several models, each of which sees what the one before it has found."""
