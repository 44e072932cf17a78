"""TorchServe's clients and archives: they work with this server as they are.

`/ping` and `/predictions/{model}` answer as TorchServe's own handlers did, for models that take pictures.
"""
