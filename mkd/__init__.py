"""mkd: Megatron Knowledge Distillation."""

__version__ = "0.1.0"
