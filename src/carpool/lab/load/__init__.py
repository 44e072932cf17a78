"""Implements the load generator: a pure core that receives the time, and thin clients for HTTP and gRPC
around it."""
