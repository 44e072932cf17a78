"""Reads settings as frozen plain data: model.toml, config.pbtxt, folders of models and the server's own
switches.

Readers at the edge, one ModelConfig in the middle. Nothing here logs or prints: a mistake is a ConfigError
that names the file and the key, and what deserves a warning is returned as a sentence.
"""
