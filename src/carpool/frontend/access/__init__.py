"""Who may do what in either protocol: keys, the names a browser may call the server by, TLS."""
