"""Serves decoupled models, which give any number of answers to a request."""
