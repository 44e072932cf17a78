"""What the processes of a server say to each other: bodies in shared memory, words on a socket.

Start at records.py for what is said. The front end's end is `frontend/remote_door.py`, the engine's
`engine/links/`, the runner's `runner/`. The law: a slot is reused only when the engine has answered for it,
every call is answered exactly once, and nothing that arrives is believed before it was checked.
"""
