"""Memory while the student writes: cached keys and values, and the logits from which tokens are sampled. While servers
write: the parameter that is exported to them."""

import math
from argparse import Namespace
from dataclasses import dataclass

from mkd.config.kd_config import KDConfig
from mkd.config.megatron.layouts import length_multiple
from mkd.job.memory.logits import shard_of
from mkd.job.memory.stage_layers import chunks_of_stage
from mkd.rollout.engine.attention import reason_against_cache
from mkd.rollout.engine.cached import cached_length

LOGIT_BYTES = 8
"""Bytes per logit where the most probable token is written, or where one kernel samples: fp32 logits, and those in the
model's dtype, from which they are converted."""
SAMPLING_BYTES = 36
"""Bytes per logit of sampling in PyTorch operations, on CPU and with top-p: float64 logits, and float64 and int64
tensors of the noise."""
SORTED_BYTES, SORTING_BYTES = 12, 48
"""Bytes of the sort of top-p per logit of the shard, in fp32 and float64, and per logit of the whole vocabulary:
float64 logits of all shards and the same joined, the sorted ones, their int64 indices, and as much as the last two for
the sort itself. The sum is what was measured on one H200, 60 bytes."""


def cached_token_bytes(args: Namespace, stage: int) -> int:
    """Bytes of keys and values of one token on a rank of a pipeline stage."""
    tp, layers = args.tensor_model_parallel_size, sum(map(len, chunks_of_stage(args, stage)))
    if args.multi_latent_attention:
        width = args.num_attention_heads // tp * (args.qk_head_dim + args.qk_pos_emb_head_dim + args.v_head_dim)
    else:
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        width = 2 * max(1, groups // tp) * args.kv_channels
    return layers * width * args.params_dtype.itemsize


def cache_tokens(args: Namespace, kd: KDConfig) -> int | None:
    """Tokens whose keys and values fit into --kd-rollout-memory-gb on every rank; None without the flag."""
    if kd.rollout_memory_gb is None:
        return None
    largest = max(cached_token_bytes(args, stage) for stage in range(args.pipeline_model_parallel_size))
    return int(kd.rollout_memory_gb * 1e9 / largest)


@dataclass(frozen=True)
class RolloutMemory:
    """Bytes on a rank of one pipeline stage, at most."""

    cache: float
    logits: float
    """0 on other stages than the last."""
    prompt_tokens: float
    """Tokens of the largest forward pass."""

    @classmethod
    def of(cls, args: Namespace, kd: KDConfig, stage: int, on_gpu: bool) -> "RolloutMemory | None":
        """The largest of all kinds of texts that the student writes; None if it writes none.

        Args:
            args: Megatron's of the student.
            kd: the flags.
            stage: pipeline stage from 0.
            on_gpu: True if the run will use GPUs.
        """
        rows = getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size
        kinds = [(rows, kd.sample_tokens, LOGIT_BYTES * shard_of(args), None)] if kd.sample_prompts is not None else []
        kinds += [(rows, kd.eval_tokens, LOGIT_BYTES * shard_of(args), None)] if kd.eval_tasks is not None else []
        if kd.is_on_policy and kd.rollout_url is None:
            logits = _sampling_bytes(args, kd, on_gpu)
            kinds.append((args.micro_batch_size, kd.rollout_tokens, logits, cache_tokens(args, kd)))
        found = [cls._of_kind(args, kd, stage, kind) for kind in kinds]
        return max(found, key=lambda one: one.cache + one.logits, default=None)

    @classmethod
    def _of_kind(
        cls, args: Namespace, kd: KDConfig, stage: int, kind: tuple[int, int, int, int | None]
    ) -> "RolloutMemory":
        """Args: microbatch rows, new tokens, bytes to choose one token, and cached tokens at most."""
        rows, new, logits, bound = kind
        stages, length, multiple = args.pipeline_model_parallel_size, args.seq_length, length_multiple(args)
        longest = cached_length(length, multiple)
        total, slots = max(rows * length * stages, multiple * longest), rows * length
        if bound is not None:
            share = max(kd.on_policy_over_time.start, kd.on_policy_over_time.end)
            own = math.ceil(args.global_batch_size * share * kd.rollout_steps / args.data_parallel_size)
            slots = math.ceil(math.ceil(own / stages) / multiple) * multiple
            total = min(bound, slots * stages * longest)
        tokens = total // stages  # of a microbatch
        texts = max(min(tokens // new, slots), multiple)
        is_last, has_cache = stage == stages - 1, reason_against_cache(args) is None
        return cls(
            cache=total * cached_token_bytes(args, stage) if has_cache else 0.0,
            logits=texts * logits if is_last else 0.0,
            prompt_tokens=max(min(tokens * (1.0 - new / length), rows * length), texts) if has_cache else rows * length,
        )


def exported_bytes(args: Namespace) -> int:
    """Bytes on a rank that writes weights for --kd-rollout-url (`mkd.checkpoint.live_export`), at most: one whole
    parameter, and the tensors that it is split into. Experts may be one tensor."""
    ffn = args.ffn_hidden_size
    if args.num_experts is not None:
        ffn = max(ffn, args.num_experts * args.moe_ffn_hidden_size)
    return 2 * args.params_dtype.itemsize * args.hidden_size * max(args.padded_vocab_size, 2 * ffn)


def _sampling_bytes(args: Namespace, kd: KDConfig, on_gpu: bool) -> int:
    """Bytes in which the next token of one text is chosen (`mkd.rollout.engine.sampler`)."""
    shard, is_sorted = shard_of(args), kd.rollout_top_p < 1.0
    if kd.rollout_temperature == 0.0 or (on_gpu and not is_sorted):
        return shard * LOGIT_BYTES
    sampled = shard * (LOGIT_BYTES + SAMPLING_BYTES)
    return max(sampled, shard * SORTED_BYTES + args.padded_vocab_size * SORTING_BYTES) if is_sorted else sampled
