"""Memory estimate of a run from its arguments alone, per pipeline stage and per part.

- `estimate`: adds the parts up for each phase of a step and takes the peak (start here)
- `parameters`: student and teacher weights, gradients, optimizer state
- `activations`: tensors that layers keep for the backward pass, and their temporary tensors
- `logits`: the chunks of logits in the loss
- `rollout`: keys and values of texts that the student writes
- `stage_layers`: layers of a pipeline stage, and microbatches in flight
- `advice`: flags that reduce the peak

Units are bytes on one rank.
"""

from mkd.job.memory.estimate import PARTS, StageMemory, Workload, estimate, fullest, offloaded_bytes, outside_of_torch
from mkd.job.memory.rollout import RolloutMemory, cache_tokens

__all__ = [
    "PARTS",
    "RolloutMemory",
    "StageMemory",
    "Workload",
    "cache_tokens",
    "estimate",
    "fullest",
    "offloaded_bytes",
    "outside_of_torch",
]
