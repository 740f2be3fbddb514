"""Alignment of one text in the tokens of two tokenizers."""
