"""Megatron's arguments: their names, their checks, and the values that are adopted from models."""
