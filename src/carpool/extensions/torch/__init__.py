"""Runs PyTorch models in a process of their own, beside the engine."""
