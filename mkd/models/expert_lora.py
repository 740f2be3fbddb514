"""Low-rank adapters of routed experts, whose weights transformers keeps in one parameter for all experts of a layer.

As in PEFT's adapters of parameters (`target_parameters`), each expert has an A and a B; gate and up, one parameter in
transformers, share the A. Megatron computes experts one after another (`SequentialMLP`) or all of them with one grouped
matrix product (`TEGroupedMLP`); forward hooks add the adapters' outputs in both.

With --expert-tensor-parallel-size, the ranks of an expert have the same tokens, and Megatron's token dispatcher sums
their outputs, and in the backward pass the gradients of their inputs. So the outputs of adapters are not exchanged: a
rank adds what its part of the sharded factor gives, and the gradients of the replicated factor are summed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mkd.config.lora import LoraOptions
from mkd.models.adapted_layers import AdaptedLinear, Factor, initial_a
from mkd.models.parameter_sync import finish_parameter_sync

_GROUPED_MULTIPLE = 8
"""The grouped matrix product of bf16 on GPUs takes matrices whose sizes are multiples of it."""


class ExpertAdapters(nn.Module):
    """The adapters of one linear layer of all experts on this rank: A [experts, rank, in], B [experts, out, rank].

    In `linear_fc1` A is replicated over the expert-tensor-parallel ranks and B sharded, in `linear_fc2` the other way
    round.
    """

    def __init__(
        self,
        linear: AdaptedLinear,
        options: LoraOptions,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        seed: int,
    ) -> None:
        """Create the factors: A uniform in +-1 / sqrt(inputs) as in PEFT, B zero.

        Args:
            linear: the layer.
            options: rank and scale.
            config: configuration of the model.
            groups: process groups of the model.
            seed: the values of an A depend on it, on the layer's name and on the expert only.
        """
        super().__init__()
        self._linear, self._options = linear, options
        self._ep, self._etp, self._replicas = groups.ep, groups.expt_tp, groups.expt_dp
        self._views: list[tuple[Tensor, Tensor]] = []
        """The factors of each expert; see `_prepare`."""
        first, count = self._ep.rank() * self.count, self.count
        for factor in linear.factors:
            axis = self.sharded_axis(factor)
            if factor.part is None:
                names = [f"{factor.layer}.{first + expert}" for expert in range(count)]
                whole = torch.stack([initial_a(name, options.rank, linear.inputs, seed) for name in names])
                values = self._part(factor, whole)
            else:
                channels = factor.channels // (1 if axis is None else self._etp.size())
                values = torch.zeros(count, channels, options.rank, device="cpu")
            parameter = nn.Parameter(values.to(config.params_dtype, copy=True))
            if axis is not None:
                set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            elif self._etp.size() > 1:
                parameter.register_hook(partial(_sum_over, self._etp))
            self.register_parameter(factor.name, parameter)

    @property
    def count(self) -> int:
        """Experts on this rank."""
        return self._linear.experts // self._ep.size()

    @property
    def factors(self) -> tuple[Factor, ...]:
        """See `AdaptedLinear.factors`."""
        return self._linear.factors

    def sharded_axis(self, factor: Factor) -> int | None:
        """The axis of a parameter that is sharded over expert-tensor-parallel ranks; None if it is replicated."""
        if self._linear.is_row_parallel:
            return 2 if factor.part is None else None
        return None if factor.part is None else 1

    def shard(self, factor: Factor, whole: Tensor) -> Tensor:
        """This rank's part of the A [experts, rank, in] or B [experts, out, rank] of a Hugging Face layer."""
        own = whole.chunk(self._ep.size())[self._ep.rank()]
        return self._part(factor, factor.of(own))

    def _part(self, factor: Factor, values: Tensor) -> Tensor:
        axis = self.sharded_axis(factor)
        return values if axis is None else values.chunk(self._etp.size(), axis)[self._etp.rank()]

    def sharded_tensors(self, prefix: str, sharded_offsets: tuple, dp_cp: ProcessGroup) -> ShardedStateDict:
        """See `LinearAdapters.sharded_tensors`; experts are replicated over other ranks than `dp_cp`."""
        assert not sharded_offsets, sharded_offsets
        state, etp = {}, self._etp
        for factor in self.factors:
            offsets, axis = [(0, self._ep.rank(), self._ep.size())], self.sharded_axis(factor)
            if axis is not None:
                offsets.append((axis, etp.rank(), etp.size()))
            replica = (0, etp.rank() if axis is None else 0, self._replicas.rank())
            name = f"{prefix}{factor.name}"
            parameter = getattr(self, factor.name)
            state[name] = ShardedTensor.from_rank_offsets(name, parameter, *offsets, replica_id=replica)
        return state

    def hook(self, experts: nn.Module) -> None:
        """Add the adapters' outputs to those of Megatron's experts, and reduce gradients as those of weights."""
        name = self._linear.path.rpartition(".")[2]
        if isinstance(experts, SequentialMLP):
            experts.register_forward_pre_hook(self._prepare)
            linears = [getattr(expert, name) for expert in experts.local_experts]
            for number, linear in enumerate(linears):
                linear.register_forward_hook(partial(self._add_to_one, number))
        else:
            linears = [getattr(experts, name)]
            linears[0].register_forward_hook(self._add_to_all)
        weight = next(linears[0].parameters())
        for parameter in self.parameters():
            parameter.allreduce = getattr(weight, "allreduce", True)

    def forward(self, inputs: Tensor, counts: Sequence[int]) -> Tensor:
        """scale B A x for tokens sorted by expert.

        Args:
            inputs: [tokens, in]
            counts: tokens of each expert.

        Returns:
            [tokens, out]
        """
        latent = grouped_linear(inputs, self.A0, counts) * self._options.scale
        return grouped_linear(latent, self._whole_b(), counts)

    def _whole_b(self) -> Tensor:
        """[experts, out, rank] in the order of Megatron's rows."""
        parts = [getattr(self, factor.name) for factor in self.factors if factor.part is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _prepare(self, experts: nn.Module, inputs: Any) -> None:
        """Pre-forward hook on the experts: views of the factors, whose gradients are put together once."""
        finish_parameter_sync(self)
        self._views = list(zip(self.A0.unbind(0), self._whole_b().unbind(0), strict=True))

    def _add_to_one(self, expert: int, linear: nn.Module, inputs: tuple, output: tuple) -> tuple:
        """Forward hook on the linear layer of one expert."""
        (a, b), (value, bias) = self._views[expert], output
        latent = nn.functional.linear(inputs[0], a) * self._options.scale
        return value + nn.functional.linear(latent, b), bias

    def _add_to_all(self, linear: nn.Module, inputs: tuple, output: tuple) -> tuple:
        """Forward hook on the linear layer of all experts."""
        value, bias = output
        return value + self(*inputs[:2]), bias


def grouped_linear(inputs: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """A linear layer of each group of rows: [n, in], [groups, out, in], rows of each group -> [n, out]."""
    is_even = all(size % _GROUPED_MULTIPLE == 0 for size in weights.shape[1:])
    if inputs.is_cuda and inputs.dtype == torch.bfloat16 and is_even and len(inputs):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        # From memory that is not pinned, the host would wait for the device's work.
        ends = ends.pin_memory().to(inputs.device, non_blocking=True)
        return nn.functional.grouped_mm(inputs, weights.transpose(1, 2), offs=ends)
    pairs = zip(inputs.split(list(counts)), weights.unbind(0), strict=True)
    return torch.cat([nn.functional.linear(rows, weight) for rows, weight in pairs])


def _sum_over(group: ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
