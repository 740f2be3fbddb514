"""Samples into rows of one length, and endless streams of rows."""
