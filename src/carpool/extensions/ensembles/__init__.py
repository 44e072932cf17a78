"""Lets one model be made of others: Triton's ensembles, whose steps are models of the same server."""
