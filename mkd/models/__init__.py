"""Student and teacher as megatron model configurations."""
