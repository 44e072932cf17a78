"""Here whole servers are replicas of an engine that places, watches and scales them. A replica is a child
process: nothing here imports what serves."""
