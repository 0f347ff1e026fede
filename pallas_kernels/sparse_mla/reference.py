"""Plain jnp definition of sparse MLA attention: implementation "xla", and the gradient of every implementation."""

import jax.numpy as jnp

from pallas_kernels.attention_math import attend_in_blocks, attend_in_blocks_grad


def _fetch(kv, topk: int):
    """Keys of a block of rows: `(indices, topk_length)` -> `(k, valid)`."""

    def fetch(rows):
        indices, topk_length = rows
        valid = (indices >= 0) & (indices < kv.shape[0])
        if topk_length is not None:
            valid &= jnp.arange(topk, dtype=jnp.int32) < topk_length[:, None]
        return kv[jnp.where(valid, indices, 0)], valid

    return fetch


def sparse_mla_attention(q, kv, indices, topk_length, attn_sink, *, sm_scale: float, d_v: int):
    """See `pallas_kernels.sparse_mla_attention`; s_q, topk and s_kv are > 0. Returns (out, max_logits, lse)."""
    topk = indices.shape[1]
    return attend_in_blocks(
        q, (indices, topk_length), _fetch(kv, topk), attn_sink, keys_per_row=topk, sm_scale=sm_scale, d_v=d_v
    )


def sparse_mla_attention_grad(q, kv, indices, topk_length, attn_sink, cotangents, *, sm_scale: float, d_v: int):
    """Gradients of q, kv and attn_sink for cotangents of (out, max_logits, lse). Sums over rows are float32."""
    topk = indices.shape[1]
    fetch = _fetch(kv, topk)

    def add_keys(dkv, rows, dk):
        _, valid = fetch(rows)
        return dkv.at[jnp.where(valid, rows[0], kv.shape[0])].add(dk, mode="drop")

    dq, dsink, dkv = attend_in_blocks_grad(
        q,
        (indices, topk_length),
        fetch,
        attn_sink,
        cotangents,
        jnp.zeros(kv.shape, jnp.float32),
        add_keys,
        keys_per_row=topk,
        sm_scale=sm_scale,
        d_v=d_v,
    )
    return dq, dkv.astype(kv.dtype), dsink
