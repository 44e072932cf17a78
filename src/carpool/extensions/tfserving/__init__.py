"""Answers TensorFlow Serving's REST clients: predict, status and metadata."""
