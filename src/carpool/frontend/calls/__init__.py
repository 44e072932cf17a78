"""Implements one request, whatever protocol it comes over: its content, its way to the engine, and its
answer."""
