"""Leads pictures to the engine: what every front end that takes them shares."""
