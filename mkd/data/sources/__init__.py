"""Sources of samples: text files, chat files, indexed token files, and aligned samples for several tokenizers."""
