"""Projection from the student's to a teacher's vocabulary, and both vocabularies in shards."""
