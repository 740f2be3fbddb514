"""Outputs of a teacher's layers: recorded in its forward pass and sent to the stages of the paired student layers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class HiddenShape:
    """Shape and dtype of one layer's output."""

    width: int
    dtype: torch.dtype
    slices: int
    """Tensor-parallel ranks that the sequence is split over; 1 without sequence parallelism."""

    def empty(self, samples: int, tokens: int) -> Tensor:
        """[tokens/slices, samples, width] on the current device, uninitialized."""
        return torch.empty(tokens // self.slices, samples, self.width, dtype=self.dtype, device="cuda")


@dataclass
class LayerRecorder:
    """Keeps the outputs of some layers of a frozen model, one tensor per layer and forward pass, until `take`."""

    shape: HiddenShape
    """Shape of one output."""
    _outputs: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def on(cls, model: GPTModel, layers: Collection[int]) -> "LayerRecorder":
        """Record those of `layers`, counted from 1 over the whole model, that this stage has."""
        config = model.config
        recorder = cls(
            HiddenShape(
                width=config.hidden_size,
                dtype=torch.float32 if config.fp32_residual_connection else config.params_dtype,
                slices=config.tensor_model_parallel_size if config.sequence_parallel else 1,
            )
        )
        for layer in model.decoder.layers:
            if layer.layer_number in layers:
                recorder._outputs[layer.layer_number] = []
                layer.register_forward_hook(recorder._keep)
        return recorder

    def _keep(self, layer: nn.Module, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        # Detached, because Megatron's pipeline schedules may free the data of the tensor object that a stage sends.
        self._outputs[layer.layer_number].append(output[0].detach())

    @property
    def layers(self) -> list[int]:
        """The recorded layers of this stage."""
        return sorted(self._outputs)

    def take(self) -> dict[int, list[Tensor]]:
        """Layer -> its outputs [s, b, Ht] (or slices [s/tp, b, Ht]) since the last call, one per forward pass; they are
        removed from the recorder."""
        taken = self._outputs
        self._outputs = {layer: [] for layer in taken}
        return taken


@dataclass(frozen=True, order=True)
class LayerRoute:
    """A layer of the teacher, the stage that has it, and a stage that needs its output."""

    layer: int
    source: int
    destination: int


def deliver(
    recorded: dict[int, list[Tensor]],
    routes: Sequence[LayerRoute],
    group: ProcessGroup,
    shape: HiddenShape,
    sizes: Sequence[tuple[int, int]],
) -> dict[int, list[Tensor]]:
    """Send layer outputs to the stages that need them, point to point.

    Args:
        recorded: layer -> one tensor per microbatch, for the layers of this stage.
        routes: the same on all ranks of the group.
        group: the pipeline-parallel group. Collective over it.
        shape: shape of an output.
        sizes: (samples, tokens) of each microbatch.

    Returns:
        Layer -> one tensor per microbatch, for the layers that this stage needs.
    """
    here = dist.get_rank(group)
    needed: dict[int, list[Tensor]] = {}
    transfers = []
    for route in sorted(routes):
        if route.source == route.destination == here:
            needed[route.layer] = recorded[route.layer]
        elif route.source == here:
            peer = dist.get_global_rank(group, route.destination)
            transfers += [dist.P2POp(dist.isend, t.contiguous(), peer, group) for t in recorded[route.layer]]
        elif route.destination == here:
            peer = dist.get_global_rank(group, route.source)
            needed[route.layer] = [shape.empty(*size) for size in sizes]
            transfers += [dist.P2POp(dist.irecv, t, peer, group) for t in needed[route.layer]]
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return needed
