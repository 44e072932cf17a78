"""Models that are Python files: python_backend.py, worker_process.py and call_server.py are in the engine,
python_worker.py and, for Triton's models, triton_worker.py are each's own process."""
