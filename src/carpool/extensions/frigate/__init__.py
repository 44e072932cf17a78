"""Answers Frigate's detectors: `deepstack` over HTTP, and `zmq` by a process beside the server."""
