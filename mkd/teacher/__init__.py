"""The frozen teacher, and what the loss gets from it."""
