"""Answers that a front end keeps."""
