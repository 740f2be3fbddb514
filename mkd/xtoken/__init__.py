"""Students and teachers that cut text into different tokens."""
