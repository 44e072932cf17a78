"""Runs the scheduler under a virtual clock: arrivals, traces, and what would become of them."""
