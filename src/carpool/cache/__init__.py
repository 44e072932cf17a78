"""Answers that are there already: kept by the front ends, and shared with those of other servers."""
