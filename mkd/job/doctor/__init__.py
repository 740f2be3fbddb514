"""Diagnosis for `mkd doctor`: the environment, and a job's command line with all files that it names."""
