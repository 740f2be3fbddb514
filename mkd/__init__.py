"""mkd: Megatron Knowledge Distillation."""
