"""The configuration of a run: flags, values, and the checks between them."""
