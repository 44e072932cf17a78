"""Carpool: a vision-model server that keeps the latency you promise."""

__version__ = "0.1.0"
