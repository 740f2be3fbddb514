"""Texts that the student of a job writes: rows of --kd-on-policy, samples, and answers to tasks."""
