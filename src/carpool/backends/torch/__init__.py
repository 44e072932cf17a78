"""PyTorch models; pytorch.py is the way in. Nothing here is imported before a model needs it."""
