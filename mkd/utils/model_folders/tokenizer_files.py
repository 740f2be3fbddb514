"""Names of the files of tokenizers and processors in a model folder."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_MARKERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""A folder with one of these holds a tokenizer; the other files only complete one."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files that prepare images for the vision tower of a vision-language model."""
