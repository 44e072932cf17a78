"""Parts of `gpu.py`: what is served, what one process can do alone, and who watches the device."""
