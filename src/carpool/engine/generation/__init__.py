"""This module has models that write token by token: core/text_scheduler.py with a clock, a thread and a
device."""
