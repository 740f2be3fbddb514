"""Cached targets: record format, shards, reading and writing."""
