"""Sparse MLA attention over a flat workspace of KV rows."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import (
    check_array,
    check_int,
    check_real,
    interpreter,
    match_varying,
    resolve_implementation,
    vary_alike,
)
from pallas_kernels.sparse_mla import reference


class SparseMLAOutput(NamedTuple):
    """Result of `sparse_mla_attention`.

    Attributes:
      out: [s_q, h_q, d_v] in q's dtype.
      max_logits: [s_q, h_q] float32: largest logit (after sm_scale) of a row's valid keys; -inf if it has none.
      lse: [s_q, h_q] float32: natural log-sum-exp of these logits, without the sink; +inf if there is none.
    """

    out: jax.Array
    max_logits: jax.Array
    lse: jax.Array


def sparse_mla_attention(
    q,
    kv,
    indices,
    topk_length=None,
    attn_sink=None,
    *,
    sm_scale: float,
    d_v: int = 512,
    implementation=None,
    interpret=False,
) -> SparseMLAOutput:
    """Attention of every query row over the KV rows that its index row selects (one KV head, V the head of each row).

    logits = (q . kv) * sm_scale over the valid keys, lse = ln sum exp(logits),
    out = softmax(logits) @ kv[:, :d_v] * exp(lse) / (exp(lse) + exp(attn_sink)).
    Column c of row t is a valid key iff c < topk_length[t] and 0 <= indices[t, c] < s_kv. Every other index value is
    ignored, whatever it is; repeated ones count repeatedly; KV rows that are not selected may hold NaN.

    Args:
      q: [s_q, h_q, d_qk] bfloat16 or float32.
      kv: [s_kv, d_qk], q's dtype.
      indices: [s_q, topk] int32 rows of kv.
      topk_length: [s_q] int32, clamped to 0..topk; None: topk.
      attn_sink: [h_q] float32: a logit (natural units) that joins the denominator only. -inf: no effect; +inf: out is
        0. It changes neither lse nor max_logits.
      sm_scale: factor of the logits.
      d_v: values per head, the first d_v of a KV row.
      implementation: None, "xla" or "mosaic_gpu" (Hopper; bfloat16, d_qk 512 or 576, d_v 512, h_q <= 128).
      interpret: run the Mosaic kernel in Pallas' interpreter on CPU (True, or `plgpu.InterpretGPUParams`).

    Returns:
      SparseMLAOutput(out, max_logits, lse). A row without a valid key: out 0, max_logits -inf, lse +inf for any sink.
      Differentiable in q, kv and attn_sink (reverse mode, computed in plain jnp block by block for any implementation).

    Raises:
      ValueError: a wrong shape or dtype.
      NotImplementedError: "mosaic_gpu" was named for arguments that the kernel does not serve.

    Source: semantics of FlashMLA `flash_mla_sparse_fwd` (`flash_mla/flash_mla_interface.py`).
    """
    dtypes = (jnp.bfloat16, jnp.float32)
    s_q, h_q, d_qk = check_array("q", q, dtypes, s_q=None, h_q=None, d_qk=None)
    s_kv, _ = check_array("kv", kv, q.dtype, s_kv=None, d_qk=d_qk)
    _, topk = check_array("indices", indices, jnp.int32, s_q=s_q, topk=None)
    if topk_length is not None:
        check_array("topk_length", topk_length, jnp.int32, s_q=s_q)
    if attn_sink is not None:
        check_array("attn_sink", attn_sink, jnp.float32, h_q=h_q)
    sm_scale, d_v = check_real("sm_scale", sm_scale), check_int("d_v", d_v)
    if d_v > d_qk:
        raise ValueError(f"`d_v` must be in 1..d_qk={d_qk}, got {d_v}.")

    def unsupported():
        from pallas_kernels.sparse_mla import mosaic_gpu

        return mosaic_gpu.unsupported(q, kv, indices, d_v=d_v)

    chosen = resolve_implementation("sparse_mla_attention", implementation, interpret, unsupported, q)
    with jax.named_scope("sparse_mla_attention"):
        if 0 in (s_q, h_q, s_kv, topk):
            empty = (
                jnp.zeros((s_q, h_q, d_v), q.dtype),
                *(jnp.full((s_q, h_q), x, jnp.float32) for x in (-jnp.inf, jnp.inf)),
            )
            return SparseMLAOutput(*(match_varying(x, q, kv, indices) for x in empty))
        options = _Options(sm_scale, d_v, chosen, interpreter(interpret))
        args = vary_alike(q, kv, indices, topk_length, attn_sink)
        return SparseMLAOutput(*_attention(*args, options))


class _Options(NamedTuple):
    sm_scale: float
    d_v: int
    implementation: str
    interpret: object


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q, kv, indices, topk_length, attn_sink, options: _Options):
    args, kwargs = (q, kv, indices, topk_length, attn_sink), dict(sm_scale=options.sm_scale, d_v=options.d_v)
    if options.implementation == "xla":
        return reference.sparse_mla_attention(*args, **kwargs)
    from pallas_kernels.sparse_mla import mosaic_gpu

    results = mosaic_gpu.sparse_mla_attention(*args, **kwargs, interpret=options.interpret)
    return tuple(match_varying(x, *args) for x in results)


def _forward(*args):
    return _attention(*args), args[:5]


def _backward(options: _Options, args, cotangents):
    dq, dkv, dsink = reference.sparse_mla_attention_grad(
        *args, cotangents=cotangents, sm_scale=options.sm_scale, d_v=options.d_v
    )
    return dq, dkv, None, None, dsink


_attention.defvjp(_forward, _backward)
