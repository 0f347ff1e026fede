"""The attention arithmetic that the plain-jnp ops share: one block of rows, many blocks, parts and sinks.

`attend` is the definition. `attend_in_blocks` and its gradient run it over blocks of rows, so that the gathered keys of
one block only are in memory at a time.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import cdiv, check_array, match_varying

BLOCK_ELEMENTS = 1 << 23
"""Gathered key values, or query values, per block of rows: 32 MiB in float32."""


def attend(q, k, valid, attn_sink, *, sm_scale: float, d_v: int):
    """Attention of every row over its own keys, in float32.

    logits = (q . k) * sm_scale over valid keys; lse = ln sum exp(logits), without the sink;
    out = softmax(logits) @ k[:, :d_v] * exp(lse) / (exp(lse) + exp(sink)).

    Args:
      q: [rows, h_q, d_qk].
      k: [rows, n, d_qk]; keys that are not valid may hold anything.
      valid: [rows, n] bool.
      attn_sink: [h_q] float32, or None.
      sm_scale, d_v: as in `sparse_mla_attention`.

    Returns:
      out [rows, h_q, d_v], max_logits and lse [rows, h_q], all float32. A row without a valid key: 0, -inf, +inf.
    """
    q, k = q.astype(jnp.float32), jnp.where(valid[..., None], k, 0).astype(jnp.float32)
    logits = jnp.einsum("rhd,rnd->rhn", q, k, precision=lax.Precision.HIGHEST) * jnp.float32(sm_scale)
    logits = jnp.where(valid[:, None], logits, -jnp.inf)
    max_logits = logits.max(-1, initial=-jnp.inf)
    shift = lax.stop_gradient(jnp.where(max_logits == -jnp.inf, 0, max_logits))
    weights = jnp.exp(logits - shift[..., None])
    total = weights.sum(-1)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.log(total) + shift
    out = jnp.einsum("rhn,rnd->rhd", weights, k[..., :d_v], precision=lax.Precision.HIGHEST) / total[..., None]
    lse = jnp.where(empty, jnp.inf, lse)
    return (out if attn_sink is None else apply_attn_sink(out, lse, attn_sink)), max_logits, lse


def _blocks(s_q: int, h_q: int, keys_per_row: int, d: int) -> tuple[int, int]:
    """Rows per block and number of blocks; the last block starts early enough to be whole."""
    size = max(1, min(s_q, BLOCK_ELEMENTS // (max(keys_per_row, h_q) * d)))
    return size, cdiv(s_q, size)


def _slice_rows(tree, start, size):
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), tree)


def attend_in_blocks(q, rows, fetch: Callable, attn_sink, *, keys_per_row: int, sm_scale: float, d_v: int):
    """`attend` over all rows of q, block by block.

    Args:
      q: [s_q, h_q, d_qk], s_q > 0.
      rows: pytree of arrays [s_q, ...]: what `fetch` needs to know of a row.
      fetch: maps a block of `rows` to its keys `(k [block, n, d_qk], valid [block, n])`.
      attn_sink: [h_q] float32, or None.
      keys_per_row: n.

    Returns:
      out [s_q, h_q, d_v] in q's dtype, max_logits and lse [s_q, h_q] float32.
    """
    (s_q, h_q, d), dtype = q.shape, q.dtype
    size, count = _blocks(s_q, h_q, keys_per_row, d)

    def step(i, results):
        start = jnp.minimum(i * size, s_q - size)
        q_block, row_block = _slice_rows((q, rows), start, size)
        k, valid = fetch(row_block)
        block = attend(q_block, k, valid, attn_sink, sm_scale=sm_scale, d_v=d_v)
        return jax.tree.map(
            lambda x, b: lax.dynamic_update_slice_in_dim(x, b.astype(x.dtype), start, 0), results, block
        )

    f32 = jnp.float32
    results = (jnp.zeros((s_q, h_q, d_v), dtype), jnp.zeros((s_q, h_q), f32), jnp.zeros((s_q, h_q), f32))
    like = jax.eval_shape(lambda: step(jnp.int32(0), results))
    return lax.fori_loop(0, count, step, jax.tree.map(match_varying, results, like))


def attend_in_blocks_grad(
    q, rows, fetch, attn_sink, cotangents, key_grads: Any, add_keys: Callable, *, keys_per_row: int, sm_scale, d_v
):
    """Gradient of `attend_in_blocks`; each block is computed again, so that nothing of it was kept.

    Args:
      q, rows, fetch, attn_sink, keys_per_row: as there.
      cotangents: of (out, max_logits, lse).
      key_grads: pytree that collects the gradient of the keys.
      add_keys: maps (key_grads, block of rows, gradient [block, n, d_qk] float32 of its keys) to the new key_grads.

    Returns:
      Gradients of q and attn_sink (None without one), and the key_grads.
    """
    s_q, h_q, d = q.shape
    size, count = _blocks(s_q, h_q, keys_per_row, d)

    def step(i, carry):
        dq, dsink, key_grads = carry
        start = jnp.minimum(i * size, s_q - size)
        q_block, row_block, cts = _slice_rows((q, rows, cotangents), start, size)
        k, valid = fetch(row_block)
        fresh = start + lax.iota(jnp.int32, size) >= i * size  # the last block overlaps the one before it
        cts = jax.tree.map(lambda c: jnp.where(fresh.reshape(-1, *[1] * (c.ndim - 1)), c.astype(jnp.float32), 0), cts)
        _, pull = jax.vjp(
            lambda q, k, sink: attend(q, k, valid, sink, sm_scale=sm_scale, d_v=d_v),
            q_block.astype(jnp.float32),
            k.astype(jnp.float32),
            attn_sink,
        )
        dq_block, dk_block, dsink_block = pull(cts)
        dq_block = dq_block.astype(dq.dtype) + lax.dynamic_slice_in_dim(dq, start, size)
        dq = lax.dynamic_update_slice_in_dim(dq, dq_block, start, 0)
        dsink = None if dsink is None else dsink + dsink_block
        return dq, dsink, add_keys(key_grads, row_block, dk_block)

    carry = (jnp.zeros_like(q), None if attn_sink is None else jnp.zeros_like(attn_sink), key_grads)
    like = jax.eval_shape(lambda: step(jnp.int32(0), carry))
    return lax.fori_loop(0, count, step, jax.tree.map(match_varying, carry, like))


def merge_attention(out_a, lse_a, out_b, lse_b):
    """Merges attention over two disjoint sets of keys into attention over both.

    out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b), lse = ln(e^lse_a + e^lse_b). Both parts must be
    WITHOUT sink; apply it once afterwards with `apply_attn_sink`.

    Args:
      out_a, out_b: [..., d_v] bfloat16 or float32, one dtype; unused where the part has no key.
      lse_a, lse_b: [...] float32, natural log; +inf where the part has no key.

    Returns:
      out [..., d_v] in their dtype and lse [...] float32. An empty part changes nothing; both empty: 0, +inf.

    Raises:
      ValueError: a shape or dtype that does not fit.
    """
    shape = _check_out("out_a", out_a)
    _check_like("out_b", out_b, out_a.dtype, shape)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _check_like(name, lse, jnp.float32, shape[:-1])
    out, lse = merge_parts((out_a, out_b), (lse_a, lse_b))
    return out.astype(out_a.dtype), lse


def merge_parts(out, lse):
    """`merge_attention` of up to some 32 parts: sequences of out [..., d_v] and lse [...]; returns both in float32.

    Without an axis of parts: of 5 or 32 parts XLA then makes two kernels instead of three or seven, of 65 up to 50.
    """
    lse = [jnp.where(jnp.isinf(part), -jnp.inf, part) for part in lse]
    top = functools.reduce(jnp.maximum, lse)
    empty = top == -jnp.inf
    shift = lax.stop_gradient(jnp.where(empty, 0, top))
    weights = [jnp.exp(part - shift) for part in lse]
    total = jnp.where(empty, 1, sum(weights))
    shares = [(weight / total)[..., None] for weight in weights]
    terms = [share * jnp.where(share == 0, 0, part.astype(jnp.float32)) for share, part in zip(shares, out)]
    return functools.reduce(jnp.add, terms), jnp.where(empty, jnp.inf, jnp.log(total) + shift)


def _check_out(name: str, out) -> tuple[int, ...]:
    shape = getattr(out, "shape", ()) or (1,)
    _check_like(name, out, (jnp.bfloat16, jnp.float32), shape)
    return shape


def _check_like(name: str, x, dtype, shape: tuple[int, ...]) -> None:
    check_array(name, x, dtype, **{f"dim{i}": n for i, n in enumerate(shape)})


def apply_attn_sink(out, lse, attn_sink):
    """Scales attention output by the share that the sink leaves: out * e^lse / (e^lse + e^sink).

    Args:
      out: [..., h_q, d_v] bfloat16 or float32, without sink.
      lse: [..., h_q] float32, natural log; +inf where a row has no key (it comes out 0).
      attn_sink: [h_q] float32. -inf: no effect; +inf: out becomes 0.

    Returns:
      [..., h_q, d_v] in out's dtype.

    Raises:
      ValueError: a shape or dtype that does not fit.
    """
    shape = _check_out("out", out)
    _check_like("lse", lse, jnp.float32, shape[:-1])
    check_array("attn_sink", attn_sink, jnp.float32, h_q=shape[-2] if len(shape) > 1 else None)
    empty = jnp.isinf(lse)
    share = jax.nn.sigmoid(jnp.where(empty, 0, lse) - attn_sink)[..., None]
    return jnp.where(empty[..., None], 0, share * out.astype(jnp.float32)).astype(out.dtype)
