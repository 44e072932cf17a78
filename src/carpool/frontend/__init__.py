"""Front ends: they translate between a wire protocol and the one client of the engine.

What to run, when and in which batch is the engine's decision. Before they ask it, front ends check requests,
answer from caches, choose a side of a rollout, decode pictures, and refuse what is certain to be too late.
"""
