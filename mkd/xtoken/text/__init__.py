"""One text in the tokens of two tokenizers, aligned."""
