"""How much memory a run needs, from its arguments alone: by pipeline stage, part by part."""

from mkd.memory.estimate import PARTS, StageMemory, Workload, estimate, fullest, outside_of_torch

__all__ = ["PARTS", "StageMemory", "Workload", "estimate", "fullest", "outside_of_torch"]
