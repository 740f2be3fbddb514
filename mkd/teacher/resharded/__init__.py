"""A teacher on the student's ranks in a parallel layout of its own."""
