"""Teachers with another tokenizer: alignment of texts, projection between vocabularies, losses per text chunk."""
