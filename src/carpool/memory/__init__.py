"""Implements what processes share: bodies and answers in slots, gates, pulses, and the memory that clients
register."""
