"""Exports spans of requests to an OpenTelemetry collector, and follows the trace context of clients."""
