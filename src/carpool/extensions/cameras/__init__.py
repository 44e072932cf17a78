"""Videos and cameras as live sources of a server: read, asked about, drawn on and counted."""
