"""Implements the load generator: a pure core that is told the time, and thin clients for HTTP and gRPC around
it."""
