"""Filling and looking after a teacher cache: what tools/cache_teacher.py does."""
