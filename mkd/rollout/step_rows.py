"""The rows of a training step, and their places on data-parallel ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepRows:
    """The rows of a step's global batch, as Megatron's sampler distributes them over the data-parallel ranks."""

    iteration: int
    """The step, counted from 0."""
    microbatches: int
    """Microbatches on each rank."""
    micro_batch_size: int
    """Rows of a microbatch."""
    replicas: int
    """Data-parallel size."""
    before: int | None = None
    """Rows of all steps before; None: each had as many."""

    @property
    def count(self) -> int:
        """Rows of the global batch."""
        return self.microbatches * self.micro_batch_size * self.replicas

    def replica(self, row: int) -> int:
        """The data-parallel rank of a row of the global batch."""
        return row % (self.micro_batch_size * self.replicas) // self.micro_batch_size

    def own(self, row: int) -> int:
        """Number of a row of the global batch among those of its rank."""
        microbatch = row // (self.micro_batch_size * self.replicas)
        return microbatch * self.micro_batch_size + row % self.micro_batch_size
