"""Plain jnp definition of the strided combine: also implementation "xla"."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import cdiv

WIDTH_MULTIPLE = 128
"""Widths of combined rows are multiples of this: whole key blocks of the attention kernels."""


def combined_width(topk: int, window: int) -> int:
    """Columns of a combined row: topk + window, rounded up to whole key blocks."""
    return cdiv(topk + window, WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def combine_swa_indices(
    topk_indices,
    query_pos,
    query_req,
    compressed_base,
    swa_base,
    swa_first_pos,
    *,
    compress_ratio: int,
    topk: int,
    window: int,
):
    """See `pallas_kernels.combine_swa_indices`. Returns (indices, lengths)."""
    live = (query_req >= 0) & (query_req < swa_base.shape[0])
    pos = query_pos[:, None]
    seen = jnp.maximum(pos + 1, 0)
    column = lax.broadcasted_iota(jnp.int32, (query_pos.shape[0], combined_width(topk, window)), 1)

    def of_request(x):
        return x.at[query_req].get(mode="fill", fill_value=0, wrap_negative_indices=False)[:, None]

    topk_len = jnp.minimum(seen // compress_ratio, topk) if topk else jnp.zeros_like(pos)
    swa_len = jnp.minimum(seen, window)
    length = jnp.where(live[:, None], topk_len + swa_len, 0)

    if topk_indices is None:
        entry = column
    else:
        entry = jnp.pad(topk_indices, ((0, 0), (0, column.shape[1] - topk)), constant_values=-1)
    compressed = jnp.where(entry >= 0, entry + of_request(compressed_base), -1) if topk else column
    first = of_request(swa_base) + pos - swa_len + 1 - of_request(swa_first_pos)
    indices = jnp.where(column < topk_len, compressed, first + column - topk_len)
    return jnp.where(column < length, indices, -1), length[:, 0]
