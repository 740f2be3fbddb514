"""Tests with a real inference server."""
