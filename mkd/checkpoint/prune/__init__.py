"""Smaller students cut out of a teacher's folder: fewer layers, channels and heads."""
