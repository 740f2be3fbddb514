"""Hugging Face folders and Megatron checkpoints: reading, loading and writing."""
