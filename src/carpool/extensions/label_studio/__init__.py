"""Answers Label Studio as its machine-learning backend: models pre-label the tasks of a project."""
