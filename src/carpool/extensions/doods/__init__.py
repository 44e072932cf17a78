"""Answers clients of DOODS, such as Home Assistant's integration: models for boxes are its detectors."""
