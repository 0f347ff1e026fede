"""Plain jnp definition of paged MLA attention: implementation "xla", and its gradient."""

import jax.numpy as jnp

from pallas_kernels.attention_math import attend_in_blocks, attend_in_blocks_grad
from pallas_kernels.kv_rows import dequantize_rows, read_records


def _fetch(scopes):
    """Keys of a block of rows: one `(indices, topk_length)` per scope -> `(k, valid)` of all scopes, side by side."""

    def fetch(rows):
        keys, valids = [], []
        for (pages, layout, page_size), (indices, topk_length) in zip(scopes, rows):
            records, valid = read_records(pages, indices, layout=layout, page_size=page_size)
            if topk_length is not None:
                valid &= jnp.arange(indices.shape[1], dtype=jnp.int32) < topk_length[:, None]
            keys.append(dequantize_rows(records, layout=layout).astype(jnp.float32))
            valids.append(valid)
        return jnp.concatenate(keys, 1), jnp.concatenate(valids, 1)

    return fetch


def paged_mla_attention(q, scopes, rows, attn_sink, *, sm_scale: float, d_v: int):
    """See `pallas_kernels.paged_mla_attention`; b > 0. Returns (out, lse).

    Args:
      scopes: ((pages, layout, page_size), ...), the main pool and perhaps the extra one.
      rows: ((indices, topk_length), ...), one pair per scope.
    """
    n = sum(indices.shape[1] for indices, _ in rows)
    out, _, lse = attend_in_blocks(q, rows, _fetch(scopes), attn_sink, keys_per_row=n, sm_scale=sm_scale, d_v=d_v)
    return out, lse


def paged_mla_attention_grad(q, scopes, rows, attn_sink, cotangents, *, sm_scale: float, d_v: int):
    """Gradients of q and attn_sink for cotangents of (out, lse). The pools are bytes and have none."""
    n = sum(indices.shape[1] for indices, _ in rows)
    d_out, d_lse = cotangents
    dq, dsink, _ = attend_in_blocks_grad(
        q,
        rows,
        _fetch(scopes),
        attn_sink,
        (d_out, jnp.zeros_like(d_lse), d_lse),
        None,
        lambda grads, rows, dk: grads,
        keys_per_row=n,
        sm_scale=sm_scale,
        d_v=d_v,
    )
    return dq, dsink
