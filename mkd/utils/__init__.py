"""Helpers without a subject of their own: atomic files, progress bars, logging."""
