"""A teacher in a job of its own that computes final hidden states for students over ZeroMQ."""
