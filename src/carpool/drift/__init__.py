"""Watches whether pictures and answers are still what they were: statistics, alarms, cameras, what to
label."""
