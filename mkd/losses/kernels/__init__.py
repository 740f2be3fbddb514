"""The passes over a chunk of logits: eager torch and Triton."""
