"""Segments of packed rows: their bounds, their hashes, and Megatron's description of them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mkd.errors import MkdDataError


def segment_hash(tokens: Tensor) -> bytes:
    """16-byte hash of token ids ([n] integers): BLAKE2b over them as little-endian int32."""
    return hashlib.blake2b(tokens.cpu().numpy().astype("<i4").tobytes(), digest_size=16).digest()


def joined_bounds(sample: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
    """Bounds of the padded segments in the concatenation of all rows, and each segment's length without padding."""
    row_length = sample["tokens"].shape[1]
    bounds, lengths = [0], []
    for row, (padded, real) in enumerate(
        zip(sample["cu_seqlens_padded"].tolist(), sample["cu_seqlens"].tolist(), strict=True)
    ):
        if padded[0] != 0 or padded[-1] != row_length or len(padded) != len(real):
            raise MkdDataError(f"a packed row of {row_length} tokens has the segment bounds {padded}")
        for (start, end), (text_start, text_end) in zip(pairwise(padded), pairwise(real), strict=True):
            if not 0 <= text_end - text_start <= end - start:
                raise MkdDataError(
                    f"a packed segment of {text_end - text_start} tokens has {end - start} positions in its row"
                )
            if end > start:
                bounds.append(row * row_length + end)
                lengths.append(text_end - text_start)
    return bounds, lengths


MEGATRON_BOUNDS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


def packed_seq_params(bounds: Sequence[int]) -> PackedSeqParams:
    """Megatron's description of segments.

    Padding follows the text of its own segment, where causal attention does not reach it from the text. So the padded
    bounds are passed as the real ones too, and the attention kernels need no handling of padding between segments.
    max_seqlen is exact: megatron's rotary embeddings take a table as long as the row for position ids that do not
    restart in each segment.
    """
    longest = max(end - start for start, end in pairwise(bounds))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        **dict.fromkeys(MEGATRON_BOUNDS, cu_seqlens),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=False,
    )


def join_segments(packed: Sequence[PackedSeqParams], row_tokens: int) -> PackedSeqParams:
    """Segments of packed rows of equal length that follow each other in one row.

    Args:
        packed: those of each row, on the same device.
        row_tokens: tokens of one whole row.
    """
    bounds = [one.cu_seqlens_q_padded for one in packed]
    joined = torch.cat([bounds[0], *(one[1:] + row * row_tokens for row, one in enumerate(bounds[1:], start=1))])
    longest = max(one.max_seqlen_q for one in packed)
    return replace(packed[0], **dict.fromkeys(MEGATRON_BOUNDS, joined), max_seqlen_q=longest, max_seqlen_kv=longest)
