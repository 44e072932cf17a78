"""Runs experiments on the scheduler: what would happen, how many replicas, and the pictures of both."""
