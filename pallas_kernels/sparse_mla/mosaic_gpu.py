"""Hopper kernel of sparse_mla_attention (Pallas, Mosaic GPU): the attention core and a gathering producer.

`pallas_kernels/mosaic_attention.py` says how a block works. Its third warpgroup, written here, copies Q and the
selected KV rows with cp.async into the swizzled tiles, each as soon as its buffer is free. Row numbers are loaded one
round ahead, one a thread. One outside kv, or in a column past topk_length, zero-fills its row and masks its logits.
"""

from typing import Any

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it in the middle of a trace
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import CHUNK, Hopper
from pallas_kernels.mosaic_attention import (
    D_V,
    FREE,
    HALF,
    HEADS,
    LEFT0,
    LEFT1,
    MASKS,
    PAIR,
    QUERY,
    REGISTERS,
    RIGHT0,
    RIGHT1,
    SMS,
    Items,
    Shared,
    attend,
    items_of_block,
    launch,
    open_shared,
    shared_types,
)
from pallas_kernels.mosaic_interpreted import Interpreted

KERNEL_NAME = "sparse_mla_attention"
INTERPRETED_BLOCKS = 2  # few, so that small tests make a block walk over several items, too


def unsupported(q: jax.Array, kv: jax.Array, indices: jax.Array, *, d_v: int) -> str | None:
    """Why the kernel cannot serve these arguments, or None."""
    _, h_q, d_qk = q.shape
    if q.dtype != jnp.bfloat16:
        return f"the tensor cores multiply bfloat16 here, got {q.dtype} (implementation='xla' serves it)."
    if d_qk not in (512, 576) or d_v != D_V:
        return f"it serves d_qk 512 and 576 with d_v 512, got d_qk={d_qk}, d_v={d_v}."
    if h_q > 128:
        return f"it serves up to 128 heads, got h_q={h_q}."
    return None


def gather(hw, shared: Shared, items: Items, inputs, *, h_q: int, max_tokens: int):
    """Runs as warpgroup 2: fills Q, the KV tiles and the masks.

    Args:
      inputs: references q [s_q * h_q, d], kv [s_kv, d], indices [s_q, topk].
    """
    q_ref, kv_ref, indices_ref = inputs
    barriers = shared.barriers

    def round_(i, tokens, it, done, limit, next_limit, n):
        r, ends = done + i, i + 1 >= n
        query = items.query(it + jnp.where(ends, 1, 0))
        first = jnp.where(ends, 0, (i + 1) * PAIR)
        upcoming_limit = jnp.clip(jnp.where(ends, next_limit, limit), 0, max_tokens)
        upcoming = hw.load_tokens(indices_ref, query, first, upcoming_limit)

        rows0, rows1 = hw.rows_to_copy(tokens, 0), hw.rows_to_copy(tokens, 1)

        def refill(buffer, k, rows, first_chunk):
            pl.when(r > 0)(lambda: hw.wait(barriers, FREE + k, lax.rem(r + 1, 2)))
            hw.copy_rows(kv_ref, rows, first_chunk, buffer.at[0], barriers, k, keep=True)

        refill(shared.left0, LEFT0, rows0, 0)
        refill(shared.right1, RIGHT1, rows1, HALF // CHUNK)
        # By freeing these two, both warpgroups have told that they have read the mask before.
        hw.write_mask(shared.mask, tokens, kv_ref.shape[0])
        hw.arrive(barriers, MASKS + 0)
        hw.arrive(barriers, MASKS + 1)
        refill(shared.right0, RIGHT0, rows0, HALF // CHUNK)
        refill(shared.left1, LEFT1, rows1, 0)
        return upcoming

    def one_item(it, carry):
        done, limit, next_limit, tokens = carry
        later_limit = items.request(it + 2)
        pl.when(it > 0)(lambda: hw.wait(barriers, FREE + QUERY, lax.rem(it + 1, 2)))
        first = items.query(it) * h_q + items.head
        q_rows = hw.rows_to_copy(hw.consecutive_tokens(first, h_q - items.head), 0)
        hw.copy_rows(q_ref, q_rows, 0, shared.q.at[0], barriers, QUERY, keep=False)
        n = items.pairs(limit)
        tokens = lax.fori_loop(0, n, lambda i, tokens: round_(i, tokens, it, done, limit, next_limit, n), tokens)
        return done + n, next_limit, later_limit, tokens

    limit = items.request(0)
    tokens = hw.load_tokens(indices_ref, items.query(0), jnp.int32(0), jnp.clip(limit, 0, max_tokens))
    done, *_ = lax.fori_loop(0, items.count, one_item, (jnp.int32(0), limit, items.request(1), tokens))
    # Every phase is waited for, the last ones here.
    hw.wait(barriers, FREE + QUERY, lax.rem(items.count + 1, 2))
    for k in (LEFT0, RIGHT1, RIGHT0, LEFT1):
        hw.wait(barriers, FREE + k, lax.rem(done + 1, 2))


def sparse_mla_attention(
    q: jax.Array,
    kv: jax.Array,
    indices: jax.Array,
    topk_length: jax.Array | None,
    attn_sink: jax.Array | None,
    *,
    sm_scale: float,
    d_v: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `pallas_kernels.sparse_mla_attention`; no dimension is 0. Returns (out, max_logits, lse)."""
    s_q, h_q, d = q.shape
    topk = indices.shape[1]
    hw = Interpreted() if interpret else Hopper()
    blocks = min(s_q * -(-h_q // HEADS), INTERPRETED_BLOCKS if interpret else SMS)
    optional = [x for x in (topk_length, attn_sink) if x is not None]
    types = shared_types(hw, d)

    def kernel(q_ref, kv_ref, indices_ref, *refs):
        refs = list(refs)
        length_ref = refs.pop(0) if topk_length is not None else None
        sink_ref = refs.pop(0) if attn_sink is not None else None
        outputs, shared = refs[:3], open_shared(hw, types, refs[3:])
        block = lax.axis_index("block")
        items = items_of_block(hw, s_q, h_q, topk, length_ref, kv_ref, shared.words, block, blocks)

        @pl.when(items.count > 0)
        def _():
            attend(hw, shared, items, outputs, sink_ref, d=d, h_q=h_q, sm_scale=sm_scale)

            @pl.when(lax.axis_index("warpgroup") == 2)
            def _():
                plgpu.set_max_registers(REGISTERS[1], action="decrease")
                gather(hw, shared, items, (q_ref, kv_ref, indices_ref), h_q=h_q, max_tokens=topk)

    out, max_logits, lse = launch(
        kernel, (q.reshape(s_q * h_q, d), kv, indices, *optional), s_q=s_q, h_q=h_q, dtype=jnp.bfloat16,
        scratch=[t for t in types if t is not None], blocks=blocks, name=KERNEL_NAME, interpret=interpret,
    )  # fmt: skip
    return out.reshape(s_q, h_q, D_V), max_logits.reshape(s_q, h_q), lse.reshape(s_q, h_q)
