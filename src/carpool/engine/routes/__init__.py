"""How requests come to a driver: directly, by sequence, or as streams of answers."""
