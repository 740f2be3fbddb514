"""What `tools/doctor.py` looks at: the environment, and a run's command line with all that it names."""
