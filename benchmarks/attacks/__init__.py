"""Clients that mean harm, within what one of them can do: each is a function in a process of its own."""
