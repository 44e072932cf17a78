"""The v2 formats as pure functions over bytes, shared by servers and clients: start at v2.py.

The law of this folder: no sockets, no asyncio, no clocks; it imports only types and errors.
"""
