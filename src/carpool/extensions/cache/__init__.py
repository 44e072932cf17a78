"""Answers repeated requests, and pictures that show the same scene, with what was answered before."""
