"""The process in which PyTorch models live, beside the engine's: no interpreter lock is shared with them.

The engine tells it where requests lie in the front ends' memory, and it answers there. `client.py`,
`hosted.py` and `wire.py` are the engine's side, `process.py` and `instance.py` are the runner's.
"""
