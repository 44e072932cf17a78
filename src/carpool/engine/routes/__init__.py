"""Leads requests to a driver: directly, by sequence, or as streams of answers."""
