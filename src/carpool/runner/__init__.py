"""The process in which PyTorch models live, beside the engine's: no interpreter lock is shared with them.

The engine tells it where requests lie in the front ends' memory, and it answers there. Its engine side is
`engine/loading/runner_client.py`.
"""
