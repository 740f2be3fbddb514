"""Projections between two vocabularies, sharded like the student's."""
