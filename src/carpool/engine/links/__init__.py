"""The engine's end of its links to the front ends."""
