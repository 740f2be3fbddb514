"""Launches of the kernels in `chunk_kernels`."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from mkd.losses.inputs import LogitMap
from mkd.xtoken.loss.chunk_kernels import (
    by_probability_kernel,
    chunk_means_kernel,
    project_kernel,
    rest_gradient_kernel,
    token_gradient_kernel,
    token_sums_kernel,
)
from mkd.xtoken.loss.chunks import GroupTokens
from mkd.xtoken.vocabulary.sparse_rows import SparseRows

BLOCK, WARPS = 2048, 8
"""Columns per program, and its warps: one load of 16 bytes per thread of 2-byte logits."""


class TokenNorms(NamedTuple):
    """A probability is e^((z - top) / T - log_norm); each [n]."""

    top: Tensor
    """The largest logit of the shard."""
    log_norm: Tensor


class CEGradient(NamedTuple):
    """Gradient of cross-entropy by the logits: ce * e^(z - top - log_norm), minus `label` in the label's column; each
    [n]."""

    ce: Tensor
    top: Tensor
    log_norm: Tensor
    label: Tensor
    """0 where there is no cross-entropy."""
    label_column: Tensor
    """int64; not a column of this shard if that does not hold the label."""


def chunk_means(
    products: Tensor,
    tokens: GroupTokens,
    logit_map: LogitMap,
    temperature: float,
    *,
    columns: Tensor | None = None,
    norms: TokenNorms | None = None,
    reached: Tensor | None = None,
) -> Tensor:
    """[chunks, columns] fp32 means over the tokens of each chunk.

    Args:
        products: [n, ...] LM-head products of one model.
        tokens: their tokens.
        logit_map: of the model.
        temperature: T.
        columns: int64 columns of the products; None: all.
        norms: the means are those of probabilities; None: those of logits / T.
        reached: [columns] bool: the result is ln of the means (at least that of the smallest fp32 number), -inf where
            False. None: the means themselves.
    """
    width = products.shape[1] if columns is None else len(columns)
    out = products.new_empty((len(tokens.count), width), dtype=torch.float32)
    if out.numel():
        blocks = triton.cdiv(width, _block(width))
        chunk_means_kernel[(len(out) * blocks,)](
            products,
            out,
            columns,
            tokens.by_chunk,
            tokens.start,
            tokens.count,
            None if norms is None else norms.top,
            None if norms is None else norms.log_norm,
            reached,
            products.stride(0),
            out.stride(0),
            width,
            blocks,
            1.0 / temperature,
            **_constants(logit_map, width),
        )
    return out


def project(
    source: Tensor, matrix: SparseRows, out: Tensor, *, divisor: Tensor | None = None, reached: Tensor | None = None
) -> Tensor:
    """Sparse matrix [rows, columns] times each chunk's vector.

    Args:
        source: [chunks, columns] fp32.
        matrix: see `SparseRows`.
        out: [chunks, rows] fp32; it is returned.
        divisor: [chunks] divisor of the result.
        reached: [rows] bool, see `chunk_means`.
    """
    for rows in matrix.classes if len(source) else ():
        tile_rows, width = rows.tile
        blocks = triton.cdiv(len(rows.rows), tile_rows)
        project_kernel[(len(source) * blocks,)](
            source,
            out,
            rows.rows,
            rows.starts,
            rows.lengths,
            matrix.ids,
            matrix.shares,
            divisor,
            reached,
            source.stride(0),
            out.stride(0),
            len(rows.rows),
            blocks,
            ROWS=tile_rows,
            WIDTH=width,
        )
    return out


def by_probability_(by_log: Tensor, log_probability: Tensor) -> Tensor:
    """Gradient by the logarithms [chunks, columns] -> that by the probabilities, in place."""
    if by_log.numel():
        columns = by_log.shape[1]
        blocks = triton.cdiv(columns, _block(columns))
        by_probability_kernel[(len(by_log) * blocks,)](
            by_log,
            log_probability,
            by_log.stride(0),
            log_probability.stride(0),
            columns,
            blocks,
            BLOCK=_block(columns),
            num_warps=WARPS,
        )
    return by_log


def token_sums(
    products: Tensor, by_mean: Tensor, tokens: GroupTokens, norms: TokenNorms, logit_map: LogitMap, temperature: float
) -> Tensor:
    """[n] sum over the columns of this shard of a token's probabilities times their gradients [chunks, columns]."""
    out = products.new_empty(len(products), dtype=torch.float32)
    if len(products):
        columns = products.shape[1]
        token_sums_kernel[(len(products),)](
            products,
            by_mean,
            tokens.chunks,
            *norms,
            out,
            products.stride(0),
            by_mean.stride(0),
            1.0 / temperature,
            COLUMNS=columns,
            **_constants(logit_map, columns),
        )
    return out


def rest_gradient_(
    logits: Tensor,
    signs: Tensor,
    sums: Tensor,
    log_norm: Tensor,
    rest_log_norm: Tensor,
    by_rest: Tensor,
    weight: Tensor,
) -> None:
    """Gradient of gold by the mean logits / T of uncommon tokens [chunks, columns], written over them.

    It is weight * (by_rest e^(z - rest_log_norm) + (signs - sums) e^(z - log_norm)); all but `signs` are [chunks].
    """
    if logits.numel():
        columns = logits.shape[1]
        blocks = triton.cdiv(columns, _block(columns))
        rest_gradient_kernel[(len(logits) * blocks,)](
            logits,
            signs,
            *(x.contiguous() for x in (sums, log_norm, rest_log_norm, by_rest, weight)),
            logits.stride(0),
            signs.stride(0),
            columns,
            blocks,
            BLOCK=_block(columns),
            num_warps=WARPS,
        )


def write_token_gradient(
    products: Tensor,
    by_mean: Tensor,
    tokens: GroupTokens,
    out: Tensor,
    logit_map: LogitMap,
    temperature: float,
    *,
    columns: Tensor | None = None,
    norms: TokenNorms | None = None,
    sums: Tensor | None = None,
    ce: CEGradient | None = None,
) -> None:
    """Write the gradient by the student's products into `out`, which may be the products.

    Args:
        products: [n, ...] of the student.
        by_mean: [chunks, columns] gradient by the mean of each chunk's logits / T, which is divided by the number of
            tokens; or with `norms` the gradient by the probability of each of its tokens.
        tokens: the student's tokens.
        out: as the products, any float dtype.
        logit_map, temperature, columns: see `chunk_means`; `by_mean` contains the factor 1 / T.
        norms, sums: of probabilities; `sums` are those of `token_sums` over all shards.
        ce: coefficients of cross-entropy.
    """
    width = by_mean.shape[1]
    if not len(products) or not width:
        return
    blocks = triton.cdiv(width, _block(width))
    top = None if norms is None else norms.top
    if ce is not None:
        top = ce.top
    token_gradient_kernel[(len(products) * blocks,)](
        products,
        by_mean,
        out,
        columns,
        tokens.chunks,
        tokens.count if norms is None else None,
        sums,
        None if norms is None else norms.log_norm,
        top,
        *((None,) * 4 if ce is None else (x.contiguous() for x in (ce.ce, ce.log_norm, ce.label, ce.label_column))),
        products.stride(0),
        by_mean.stride(0),
        out.stride(0),
        width,
        blocks,
        1.0 / temperature,
        **_constants(logit_map, width),
    )


def _constants(logit_map: LogitMap, columns: int) -> dict[str, float | int]:
    return {
        "SCALE": float(logit_map.scale),
        "SOFTCAP": float(logit_map.softcap or 0.0),
        "BLOCK": _block(columns),
        "num_warps": WARPS,
    }


def _block(columns: int) -> int:
    return min(BLOCK, triton.next_power_of_2(max(columns, 16)))
