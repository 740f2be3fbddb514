"""Adapters of Hugging Face models: which layers have them, PEFT folders, and the adapters of checkpoints."""
