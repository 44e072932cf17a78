"""Implements what operators and registries ask of a running engine: rollouts, drift, questions."""
