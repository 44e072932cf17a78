"""The gRPC front end: the v2 protocol's service and gRPC's own health service, behind the door.

Start at grpc_handlers.py, which finds the handler of a call; grpc_infer.py is the hot path.
"""
