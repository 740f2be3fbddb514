"""Megatron model configurations of student and teacher, and trained maps between their layers."""
