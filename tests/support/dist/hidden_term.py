"""The term of intermediate layers by plain autograd of its definition: for workers of the pool, one rank."""

from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from mkd.distributed.groups import Groups
from mkd.losses.hidden import cosine, mse
from mkd.models.layer_maps import add_maps, name_of_map, new_map
from tests.support.dist.kd_samples import microbatches
from tests.support.dist.kd_step import Layout, Models, build_student, build_teacher, gradients


def hidden_term(rank: int, world_size: int, models: Models) -> dict[str, Any]:
    """Sum over tokens and pairs of the distance, and the gradients of R * W times it, as `kd_step` gives them but not
    divided by the number of tokens."""
    ps.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    try:
        return _hidden_term(models)
    finally:
        ps.destroy_model_parallel()


def _hidden_term(models: Models) -> dict[str, Any]:
    groups, kd = Groups.from_megatron(), models.kd
    teacher = build_teacher(Layout(), models, groups)._model
    width = teacher.config.hidden_size

    def with_maps(chunks: list[nn.Module]) -> list[nn.Module]:
        for chunk in chunks:
            maps = {name_of_map(pair): new_map(pair, chunk.config, width, seed=1) for pair in kd.layer_pairs}
            add_maps(chunk, nn.ModuleDict({} if width == chunk.config.hidden_size else maps))
        return chunks

    chunks = build_student(Layout(), models, groups, [with_maps])
    student = unwrap_model(chunks[0])
    ours, theirs = outputs_of(student), outputs_of(teacher)
    total = torch.zeros(())
    for batch in microbatches("text", 1, 2, 0, 1):
        inputs = (batch["tokens"], batch["position_ids"], None)
        with torch.no_grad():
            teacher(*inputs)
        student(*inputs)
        for pair in kd.layer_pairs:
            hidden, target = ours[pair.student], theirs[pair.teacher]
            if hasattr(student, "kd_projections"):
                hidden = hidden @ student.kd_projections[name_of_map(pair)].weight.t()
            distance = {"mse": mse, "cosine": cosine}[kd.hidden_loss_type](hidden, target)
            total = total + (distance * batch["loss_mask"].t()).sum()
    (kd.ratio * kd.hidden_loss_weight * total).backward()
    return {"sum": total.detach(), "gradients": gradients(chunks)}


def outputs_of(model: nn.Module) -> dict[int, Tensor]:
    """Layer, counted from 1 -> its output [s, b, H] in the latest forward pass."""
    seen: dict[int, Tensor] = {}
    for number, layer in enumerate(model.decoder.layers, 1):
        layer.register_forward_hook(lambda _, inputs, output, number=number: seen.__setitem__(number, output[0]))
    return seen
