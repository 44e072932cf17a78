"""Defines what the processes of a server say to each other: bodies in shared memory, words on a socket.

Start at records.py for what is said. The front end's end is `frontend/front_link.py`, the engine's
`engine/engine_link.py`; a process beside the engine has an end of its own. The law: a slot is reused only
when the engine has answered for it, every call is answered exactly once, and nothing that arrives is believed
before it was checked.
"""
