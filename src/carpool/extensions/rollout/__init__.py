"""Lets a new version of a model take over from the one that serves, a share of the requests at a time."""
