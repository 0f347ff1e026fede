"""Paged MLA attention: every query row reads its own KV rows straight out of the paged pools."""

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
from pallas_kernels.kv_layout import KVLayout, check_layout
from pallas_kernels.paged_mla import reference


class PagedMLAOutput(NamedTuple):
    """Result of `paged_mla_attention`.

    Attributes:
      out: [b, h_q, d_v] in q's dtype.
      lse: [b, h_q] float32: natural log-sum-exp of the logits of both scopes, without the sink; +inf without a key.
    """

    out: jax.Array
    lse: jax.Array


def _check_scope(prefix: str, b: int, d_qk: int, pages, indices, topk_length, layout, page_size) -> None:
    check_layout(f"{prefix}layout", layout).check_pages(f"{prefix}pages", pages, page_size)
    if layout.d != d_qk:
        raise ValueError(f"`{prefix}layout` must have rows of d_qk={d_qk} values, got {layout!r} with d={layout.d}.")
    check_array(f"{prefix}indices", indices, jnp.int32, b=b, topk=None)
    if topk_length is not None:
        check_array(f"{prefix}topk_length", topk_length, jnp.int32, b=b)


def paged_mla_attention(
    q,
    pages,
    indices,
    topk_length=None,
    attn_sink=None,
    extra_pages=None,
    extra_indices=None,
    extra_topk_length=None,
    *,
    layout: KVLayout,
    page_size: int,
    extra_layout: KVLayout | None = None,
    extra_page_size: int | None = None,
    sm_scale: float,
    d_v: int = 512,
    implementation=None,
    interpret=False,
) -> PagedMLAOutput:
    """Attention of every query row over the pool slots that its index rows select, dequantised on the way.

    One softmax over the union of both scopes (main and extra pool), each key the dequantised row of its slot rounded to
    the layout's dtype: logits = (q . k) * sm_scale, lse = ln sum exp(logits),
    out = softmax(logits) @ k[:, :d_v] * exp(lse) / (exp(lse) + exp(attn_sink)).
    Column c of row t is a valid key iff c < topk_length[t] and its slot is inside the pool; any other is ignored.

    Args:
      q: [b, h_q, d_qk] bfloat16 or float32.
      pages: [num_pages, stride] uint8, the main pool.
      indices: [b, topk] int32 physical slots of the main pool, any order.
      topk_length: [b] int32, clamped to 0..topk; None: topk.
      attn_sink: [h_q] float32, natural units; as in `sparse_mla_attention`.
      extra_pages, extra_indices, extra_topk_length: the same for the extra pool, or None.
      layout, page_size: of the main pool; layout.d is d_qk.
      extra_layout, extra_page_size: of the extra pool.
      sm_scale: factor of the logits.
      d_v: values per head, the first d_v of a KV row.
      implementation: None, "xla" or "mosaic_gpu" (Hopper; bfloat16 q and rows, d_v 512, h_q <= 128).
      interpret: run the Mosaic kernel in Pallas' interpreter on CPU (True, or `plgpu.InterpretGPUParams`).

    Returns:
      PagedMLAOutput(out, lse). A row without a valid key: out 0, lse +inf for any sink. Differentiable in q and
      attn_sink (reverse mode, computed in plain jnp block by block for any implementation).

    Raises:
      ValueError: a wrong shape, dtype or page stride, or half an extra scope.
      NotImplementedError: "mosaic_gpu" was named for arguments that the kernel does not serve.

    Source: semantics of FlashMLA `flash_mla_with_kvcache` with `indices` (`flash_mla/flash_mla_interface.py`).
    """
    b, h_q, d_qk = check_array("q", q, (jnp.bfloat16, jnp.float32), b=None, h_q=None, d_qk=None)
    _check_scope("", b, d_qk, pages, indices, topk_length, layout, page_size)
    scopes, rows = [(pages, layout, page_size)], [(indices, topk_length)]
    extra = dict(extra_indices=extra_indices, extra_layout=extra_layout, extra_page_size=extra_page_size)
    for name, value in (extra | dict(extra_topk_length=extra_topk_length)).items():
        if extra_pages is None and value is not None:
            raise ValueError(f"`extra_pages` must be given with `{name}`, got None.")
        if extra_pages is not None and value is None and name != "extra_topk_length":
            raise ValueError(f"`{name}` must be given with `extra_pages`, got None.")
    if extra_layout is not None and extra_page_size is not None:
        _check_scope("extra_", b, d_qk, extra_pages, extra_indices, extra_topk_length, extra_layout, extra_page_size)
        scopes.append((extra_pages, extra_layout, extra_page_size))
        rows.append((extra_indices, extra_topk_length))
    if attn_sink is not None:
        check_array("attn_sink", attn_sink, jnp.float32, h_q=h_q)
    sm_scale, d_v = check_real("sm_scale", sm_scale), check_int("d_v", d_v)
    if d_v > d_qk:
        raise ValueError(f"`d_v` must be in 1..d_qk={d_qk}, got {d_v}.")

    def unsupported():
        from pallas_kernels.paged_mla import mosaic_gpu

        return mosaic_gpu.unsupported(q, scopes, d_v=d_v)

    chosen = resolve_implementation("paged_mla_attention", implementation, interpret, unsupported, q)
    with jax.named_scope("paged_mla_attention"):
        with_keys = [(scope, row) for scope, row in zip(scopes, rows) if row[0].shape[1] and scope[0].shape[0]]
        if 0 in (b, h_q) or not with_keys:
            empty = (jnp.zeros((b, h_q, d_v), q.dtype), jnp.full((b, h_q), jnp.inf, jnp.float32))
            return PagedMLAOutput(*(match_varying(x, q, indices) for x in empty))
        scopes, rows = zip(*with_keys)
        statics = tuple((layout, page_size) for _, layout, page_size in scopes)
        options = _Options(statics, sm_scale, d_v, chosen, interpreter(interpret))
        args = vary_alike(q, tuple(pages for pages, _, _ in scopes), tuple(rows), attn_sink)
        return PagedMLAOutput(*_attention(*args, options))


class _Options(NamedTuple):
    pools: tuple[tuple[KVLayout, int], ...]
    sm_scale: float
    d_v: int
    implementation: str
    interpret: object

    def scopes(self, pages):
        return [(p, *pool) for p, pool in zip(pages, self.pools)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attention(q, pages, rows, attn_sink, options: _Options):
    kwargs = dict(sm_scale=options.sm_scale, d_v=options.d_v)
    if options.implementation == "xla":
        return reference.paged_mla_attention(q, options.scopes(pages), rows, attn_sink, **kwargs)
    from pallas_kernels.paged_mla import mosaic_gpu

    results = mosaic_gpu.paged_mla_attention(
        q, pages, rows, attn_sink, layouts=options.pools, **kwargs, interpret=options.interpret
    )
    return tuple(match_varying(x, *jax.tree.leaves((q, pages, rows, attn_sink))) for x in results)


def _forward(*args):
    return _attention(*args), args[:4]


def _backward(options: _Options, args, cotangents):
    q, pages, rows, attn_sink = args
    kwargs = dict(sm_scale=options.sm_scale, d_v=options.d_v)
    dq, dsink = reference.paged_mla_attention_grad(q, options.scopes(pages), rows, attn_sink, cotangents, **kwargs)
    return dq, None, None, dsink


_attention.defvjp(_forward, _backward)
