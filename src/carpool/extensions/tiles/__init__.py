"""Finds small objects in large images: cuts an image into overlapping tiles, asks the model about each, and
merges what it finds, as sahi does. `?tile=640` asks for it in one request, [tiles] in model.toml for all."""
