"""Says where versions of models come from besides folders: an address is resolved, its files are fetched."""
