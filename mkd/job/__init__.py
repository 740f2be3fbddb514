"""A training job, from its command line to the training loop."""
