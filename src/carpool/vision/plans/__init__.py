"""Decides what is done with the pictures of one model: its settings, the pixels it wants, how answers
compare."""
