"""Serves programs that ask a server: `carpool.Client`, and `carpool.AsyncClient` for asyncio."""
