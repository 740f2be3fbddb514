"""The frozen teacher and the signals that it returns to the loss."""
