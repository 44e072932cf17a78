"""Models that write their answers token by token: core/steps.py with a clock, a thread and a device."""
