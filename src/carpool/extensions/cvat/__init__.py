"""Answers CVAT in place of nuclio: models are functions that annotate tasks."""
