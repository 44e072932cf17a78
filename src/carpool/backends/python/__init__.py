"""Models that are Python files: python_backend.py is in the engine, python_worker.py each's own process."""
