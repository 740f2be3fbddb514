"""Samples from text files, chat files and indexed token files."""
