"""Reports on Carpool itself: counters, the metrics page, the statistics document and logs.

The law of this folder: counting takes no lock, allocates nothing that lasts and never raises in the hot path;
whatever is slow happens at the scrape. Start at columns.py for what is counted and counters.py for how.
"""
