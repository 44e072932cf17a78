"""Leads pictures through the door: what every front end that takes them shares."""
