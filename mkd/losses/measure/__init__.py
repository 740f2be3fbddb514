"""Measurements on logits without a gradient: comparison, top-k, sampling."""
