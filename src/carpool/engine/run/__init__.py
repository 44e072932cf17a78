"""Batches are formed, gathered and run here, by one driver for each model version."""
