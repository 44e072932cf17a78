"""Measures rates × settings in turn on real servers, and writes a report that a browser opens by itself."""
