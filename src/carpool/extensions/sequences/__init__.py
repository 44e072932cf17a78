"""Sends requests that belong together to one instance, in their order, with the state of their sequence."""
