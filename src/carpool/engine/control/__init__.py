"""Implements what operators ask of a running engine: loads, clients' memory, profiles."""
