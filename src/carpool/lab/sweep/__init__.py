"""Rates × settings, measured in turn on real servers, and a report that a browser opens by itself."""
