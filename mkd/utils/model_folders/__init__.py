"""Folders of models and tokenizers.

pretrained.py       tokenizers and models that transformers loads from a folder
hub_folder.py       folders of the hub's cache, and names of repositories in place of a folder
formats.py          a Megatron checkpoint in place of a Hugging Face folder, and the reverse
tokenizer_files.py  the names of tokenizers' files; tokenizer_flag.py: the flag that named their folder
regular_files.py    refuses pipes and oversized files before another library reads a folder
chat_template.py    conversations as the text that a folder's template makes of them
"""
