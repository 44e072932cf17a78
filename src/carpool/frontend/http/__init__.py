"""Implements HTTP/1.1 over asyncio: our own protocol, so that a tensor goes from the socket straight into its
slot."""
