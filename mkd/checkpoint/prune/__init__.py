"""Pruning: students with fewer layers, channels and attention heads, initialized from a teacher's weights."""
