"""Watches how a model's pictures and answers change from week to week, and keeps pictures worth a label."""
