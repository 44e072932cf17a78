"""The gRPC front end: the v2 protocol's service and gRPC's own health service, behind the door.

Start at service.py, which finds the handler of a call; inference.py is the hot path.
"""
