"""Metrics, console output, trackers."""
