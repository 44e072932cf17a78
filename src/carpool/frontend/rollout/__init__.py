"""Implements what a front end does while one version of a model takes over from another."""
