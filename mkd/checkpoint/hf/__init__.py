"""Hugging Face model folders: families, import, export."""
