"""Keeps the loaded versions of all models: which are wanted, which serve, who may call whom."""
