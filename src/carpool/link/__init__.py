"""The link between a front-end process and the engine process: bodies in shared memory, words on a socket.

Start at records.py for what is said; remote_door.py is the front end's side and engine_side.py the engine's.
The law of this folder: a slot is reused only when the engine has answered for it, every call is answered
exactly once, and nothing that arrives is believed before it was checked.
"""
