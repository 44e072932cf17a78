"""The law of scheduling consists of pure decisions over state and a given `now`.

Standard library only. Nothing here reads a clock, sleeps, starts a thread, logs or counts a metric.
Start reading at batcher.py.
"""
