"""Finds what a model costs by batch size: measured, chosen from, and kept."""
