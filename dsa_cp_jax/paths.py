"""The two ways to run a chunk's attention, rank-local: no mesh in here.

`sparse_prefill` gathers the chunk's KV once and attends over the workspace; `dense_prefill` lets every row read its own
KV out of the pools. Both take each row's request and position, and never derive a position from a row number.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dsa_cp_jax.chunk import ChunkPlan, visible_entries
from dsa_cp_jax.config import DSAConfig, compress_ratio
from dsa_cp_jax.kv_cache import KVPool
from pallas_kernels import combine_swa_indices, gather_workspace, paged_mla_attention, sparse_mla_attention


def sparse_prefill(
    q,
    query_pos,
    query_req,
    plan: ChunkPlan,
    swa_pool: KVPool,
    compressed_pool: KVPool | None,
    topk_indices,
    attn_sink,
    *,
    kind: str,
    config: DSAConfig,
    implementation=None,
    interpret=False,
) -> jax.Array:
    """Gather + dequantise once, combine index rows, one sparse attention over the workspace.

    Args:
      q: [rows, h, d_qk], this rank's rows (h may be a slice of the heads).
      query_pos, query_req: [rows] int32, see `ChunkPlan`; request -1 marks a row that gives 0.
      plan: the chunk's plan (global).
      swa_pool: SWA pool, holding the chunk's own rows already.
      compressed_pool: c4 or c128 pool, likewise; None for c0.
      topk_indices: [rows, topk] int32 request-local entries (c4), else None.
      attn_sink: [h] float32, or None.
      kind: "c0", "c4" or "c128".
      config: the model's DSAConfig.
      implementation, interpret: passed to the ops.

    Returns:
      [rows, h, d_v] in q's dtype.
    """
    how: dict[str, Any] = dict(implementation=implementation, interpret=interpret)
    compressed: dict[str, Any] = dict(compressed_layout=None, compressed_page_size=None)
    pages = slots = topk = None
    compressed_base, swa_base = jnp.zeros_like(plan.swa.base), plan.swa.base
    if compressed_pool is None:
        topk_indices = jnp.zeros((q.shape[0], 0), jnp.int32)
    else:
        region, page_size = plan.compressed[kind], compressed_pool.page_size
        pages, slots = compressed_pool.pages, region.slots
        compressed = dict(
            compressed_layout=compressed_pool.layout, compressed_page_size=page_size, num_compressed=region.count
        )
        compressed_base, swa_base = region.base, swa_base + slots.shape[0]
        topk = None if topk_indices is not None else plan.max_entries(kind, page_size)
    workspace = gather_workspace(
        pages,
        slots,
        swa_pool.pages,
        plan.swa.slots,
        **compressed,
        swa_layout=swa_pool.layout,
        swa_page_size=swa_pool.page_size,
        num_swa=plan.swa.count,
        **how,
    )
    indices, lengths = combine_swa_indices(
        topk_indices,
        query_pos,
        query_req,
        compressed_base,
        swa_base,
        plan.swa_first_pos,
        compress_ratio=compress_ratio(kind),
        topk=topk,
        window=config.swa_window,
        **how,
    )
    return sparse_mla_attention(
        q, workspace.astype(q.dtype), indices, lengths, attn_sink, sm_scale=config.sm_scale, d_v=config.d_v, **how
    ).out


def dense_prefill(
    q,
    query_pos,
    query_req,
    plan: ChunkPlan,
    swa_pool: KVPool,
    compressed_pool: KVPool | None,
    topk_indices,
    attn_sink,
    *,
    kind: str,
    config: DSAConfig,
    implementation=None,
    interpret=False,
) -> jax.Array:
    """Paged attention: the window out of the SWA pool (newest first), the entries out of the compressed pool.

    Right for any striding, any padding and any number of requests, because every row stands for itself. Arguments and
    result as in `sparse_prefill`.
    """
    live, req = query_req >= 0, query_req[:, None]
    pos = query_pos[:, None] - jnp.arange(config.swa_window, dtype=jnp.int32)
    extra: dict[str, Any] = {}
    if compressed_pool is not None:
        page_size = compressed_pool.page_size
        if topk_indices is None:
            entry = jnp.arange(plan.max_entries(kind, page_size), dtype=jnp.int32)[None]
        else:
            entry = topk_indices
        slots = plan.chunk.compressed_slots(kind, page_size, *jnp.broadcast_arrays(req, entry))
        extra = dict(
            extra_pages=compressed_pool.pages,
            extra_indices=slots,
            extra_topk_length=jnp.where(live, visible_entries(query_pos, kind), 0),
            extra_layout=compressed_pool.layout,
            extra_page_size=page_size,
        )
    return paged_mla_attention(
        q,
        swa_pool.pages,
        plan.chunk.swa_slots(*jnp.broadcast_arrays(req, pos)),
        jnp.where(live, jnp.minimum(query_pos + 1, config.swa_window), 0),
        attn_sink,
        **extra,
        layout=swa_pool.layout,
        page_size=swa_pool.page_size,
        sm_scale=config.sm_scale,
        d_v=config.d_v,
        implementation=implementation,
        interpret=interpret,
    ).out
