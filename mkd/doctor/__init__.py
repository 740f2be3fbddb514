"""Diagnosis for `tools/doctor.py`: the environment, and a job's command line with all files that it names."""
