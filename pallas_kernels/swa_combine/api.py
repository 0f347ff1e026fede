"""Strided combine: one row of workspace indices per query, from its top-k entries and its sliding window."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import check_array, check_int, interpreter, match_varying, resolve_implementation
from pallas_kernels.swa_combine import reference


class CombinedIndices(NamedTuple):
    """Rows for `sparse_mla_attention`.

    Attributes:
      indices: [rows, width] int32 workspace rows, -1 where there is none; width = topk + window rounded up to 128.
      lengths: [rows] int32: the columns to scan (holes in the top-k part count).
    """

    indices: jax.Array
    lengths: jax.Array


def combine_swa_indices(
    topk_indices,
    query_pos,
    query_req,
    compressed_base,
    swa_base,
    swa_first_pos,
    *,
    compress_ratio: int,
    topk: int | None = None,
    window: int = 128,
    implementation=None,
    interpret=False,
) -> CombinedIndices:
    """Combines each query's compressed entries and window positions into one row of workspace indices.

    For a row at position pos of request i, with m = compress_ratio:

        topk_len = min((pos + 1) // m, topk)      swa_len = min(pos + 1, window)
        row = [topk_indices[:topk_len] + compressed_base[i]
               | swa_base[i] + (pos - swa_len + 1 - swa_first_pos[i]) + (0 .. swa_len - 1) | -1 ...]
        length = topk_len + swa_len

    A negative top-k entry is a hole and becomes -1. A row whose request is not in [0, num_reqs) (padding, slack) is all
    -1 with length 0. Every row stands for itself: the rows of a rank under round-robin context parallelism are given
    by their own positions, never by their number.

    Args:
      topk_indices: [rows, topk] int32 entries, request-local; width 0 for a layer without compressed KV. Or None: entry
        j is j (every entry so far: c128 layers), and `topk` says how many there are at most.
      query_pos: [rows] int32, absolute position (tokens) of the query in its sequence, >= 0.
      query_req: [rows] int32, the query's request; -1 for padding and slack rows.
      compressed_base: [num_reqs] int32, workspace row of the request's compressed entry 0.
      swa_base: [num_reqs] int32, workspace row of the request's first gathered window position.
      swa_first_pos: [num_reqs] int32, that position (tokens).
      compress_ratio: tokens per compressed entry, >= 1; unused where topk is 0.
      topk: only with topk_indices None: number of entries, >= 0.
      window: width of the sliding window in tokens, the query's own included.
      implementation: None, "xla" or "mosaic_gpu" (Hopper).
      interpret: run the Mosaic kernel in Pallas' interpreter on CPU (True, or `plgpu.InterpretGPUParams`).

    Returns:
      CombinedIndices(indices [rows, width], lengths [rows]).

    Raises:
      ValueError: a wrong shape, dtype, ratio, width or window.

    Source: SGLang 0.5.23, `combine_topk_swa_indices`, with per-row positions and requests in the place of its
    contiguous ones.
    """
    (rows,) = check_array("query_pos", query_pos, jnp.int32, rows=None)
    check_array("query_req", query_req, jnp.int32, rows=rows)
    (num_reqs,) = check_array("swa_base", swa_base, jnp.int32, num_reqs=None)
    check_array("compressed_base", compressed_base, jnp.int32, num_reqs=num_reqs)
    check_array("swa_first_pos", swa_first_pos, jnp.int32, num_reqs=num_reqs)
    if topk_indices is None:
        topk = check_int("topk", topk, 0)
    else:
        _, width = check_array("topk_indices", topk_indices, jnp.int32, rows=rows, topk=topk)
        topk = width
    window = check_int("window", window)
    compress_ratio = check_int("compress_ratio", compress_ratio) if topk else 1

    # The kernel serves every width.
    chosen = resolve_implementation("combine_swa_indices", implementation, interpret, lambda: None, query_pos)
    args = jax.tree.map(jnp.asarray, (topk_indices, query_pos, query_req, compressed_base, swa_base, swa_first_pos))
    kwargs = dict(compress_ratio=compress_ratio, topk=topk, window=window)
    with jax.named_scope("combine_swa_indices"):
        if 0 in (rows, num_reqs):  # no live row
            indices = jnp.full((rows, reference.combined_width(topk, window)), -1, jnp.int32)
            empty = indices, jnp.zeros(rows, jnp.int32)
            return CombinedIndices(*(match_varying(x, *args) for x in empty))
        if chosen == "xla":
            return CombinedIndices(*reference.combine_swa_indices(*args, **kwargs))
        from pallas_kernels.swa_combine import mosaic_gpu

        results = mosaic_gpu.combine_swa_indices(*args, **kwargs, interpret=interpreter(interpret))
        return CombinedIndices(*(match_varying(x, *args) for x in results))
