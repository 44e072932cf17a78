"""Who may do what at either door: keys, the names a browser may call the server by, TLS."""
