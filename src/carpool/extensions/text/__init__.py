"""Serves models that write their answers token by token."""
