"""One version of a model takes over from another: states, guards, and what is kept of both. No sockets."""
