"""Layers of each pipeline stage, and the number of microbatches that it holds at one time."""

from argparse import Namespace

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def chunks_of_stage(args: Namespace, stage: int) -> list[range]:
    """Layer indices from 0 of each virtual stage of a pipeline stage.

    Args:
        args: Megatron's arguments of a model.
        stage: pipeline stage from 0.
    """
    size, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return _chunks_of_layout(args.pipeline_model_parallel_layout, size, stage)
    # The fields of TransformerConfig that megatron's functions read.
    config = Namespace(
        num_layers=args.num_layers,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
    )
    chunks = []
    for chunk in range(virtual or 1):
        vp_stage = chunk if virtual else None
        first = get_transformer_layer_offset(config, vp_stage, stage)
        chunks.append(range(first, first + get_num_layers_to_build(config, vp_stage, stage)))
    return chunks


def _chunks_of_layout(text: str, size: int, stage: int) -> list[range]:
    layout = PipelineParallelLayerLayout.from_str(text, size).layout
    virtual = len(layout[0])
    counts = [[part.count(LayerType.decoder) for part in rank] for rank in layout]
    chunks = []
    for chunk in range(virtual):
        before = sum(counts[rank][v] for v in range(chunk) for rank in range(size))
        first = before + sum(counts[rank][chunk] for rank in range(stage))
        chunks.append(range(first, first + counts[stage][chunk]))
    return chunks


def microbatches(args: Namespace) -> int:
    """Microbatches per step on one data-parallel rank."""
    return max(1, args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


def in_flight(args: Namespace, stage: int) -> int:
    """Microbatches whose activations a virtual stage holds before the first backward pass frees some.

    Warm-up forward passes of megatron's schedules (core/pipeline_parallel/schedules.py, `get_pp_rank_microbatches`)
    plus one. With virtual stages it counts (microbatch, virtual stage) pairs.
    """
    size, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    count = microbatches(args)
    if size == 1:
        return 1
    if not virtual:
        return min(size - stage, count)
    group = args.microbatch_group_size_per_vp_stage or size
    return min((size - stage - 1) * 2 + (virtual - 1) * group + 1, count * virtual)
