"""Implements the gRPC front end: the v2 protocol's service and gRPC's own health service.

Start at grpc_handlers.py, which finds the handler of a call; grpc_infer.py is the hot path. Below them is
HTTP/2: h2_connection.py reads frames and opens calls, rpc.py is one call on the wire, h2_outgoing.py sends.
"""
