"""Hopper kernel of sparse_mla_attention (Pallas, Mosaic GPU): the attention core and a gathering producer.

`pallas_kernels/mosaic_block.py` says how a block works. Its third warpgroup, written here, copies Q and the
selected KV rows with cp.async into the swizzled tiles, each as soon as its buffer is free. Row numbers are loaded one
round ahead, one a thread. One outside kv, or in a column past topk_length, zero-fills its row and masks its logits.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it in the middle of a trace
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import CHUNK, Hopper
from pallas_kernels.mosaic_attention import attend
from pallas_kernels.mosaic_block import (
    D_V,
    HALF,
    LEFT0,
    LEFT1,
    MASKS,
    RIGHT0,
    RIGHT1,
    Items,
    Plan,
    Shared,
    feed,
    launch,
    open_shared,
    shared_types,
    wait_until_free,
)
from pallas_kernels.mosaic_interpreted import Interpreted

KERNEL_NAME = "sparse_mla_attention"
REGISTERS = (232, 40)
"""Per thread of a computing warpgroup and of the producer. (224, 56): no spills, but 0 to 0.7 % slower (H200)."""


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


def gather(hw, shared: Shared, plan: Plan, items: Items, inputs):
    """Runs as warpgroup 2: fills Q, the KV tiles and the masks.

    Args:
      inputs: references q [s_q * h_q, d], kv [s_kv, d], indices [s_q, topk].
    """
    q_ref, kv_ref, indices_ref = inputs
    barriers = shared.barriers

    def load(row, _scope, first, end):
        return hw.load_tokens(indices_ref, row, first, end)

    def fill(r, tokens, upcoming):
        rows0, rows1 = hw.rows_to_copy(tokens, 0), hw.rows_to_copy(tokens, 1)

        def refill(buffer, k, rows, first_chunk):
            wait_until_free(hw, shared, k, r)
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

    feed(hw, shared, plan, items, q_ref, load, lambda tokens: tokens, fill)


@functools.partial(jax.jit, static_argnames=("sm_scale", "d_v", "interpret"))
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
    plan = Plan(s_q, h_q, (topk,))
    blocks = plan.blocks(interpret)
    optional = [x for x in (topk_length, attn_sink) if x is not None]
    types = shared_types(hw, d)

    def kernel(q_ref, kv_ref, indices_ref, *refs):
        refs = list(refs)
        length_ref = refs.pop(0) if topk_length is not None else None
        sink_ref = refs.pop(0) if attn_sink is not None else None
        outputs, shared = refs[:3], open_shared(hw, types, refs[3:])
        items = plan.items(hw, [length_ref], kv_ref, shared.words, lax.axis_index("block"), blocks)

        def produce():
            gather(hw, shared, plan, items, (q_ref, kv_ref, indices_ref))

        attend(hw, shared, items, outputs, sink_ref, produce, d=d, h_q=h_q, sm_scale=sm_scale, registers=REGISTERS)

    out, max_logits, lse = launch(
        kernel, (q.reshape(s_q * h_q, d), kv, indices, *optional), s_q=s_q, h_q=h_q, dtype=jnp.bfloat16,
        scratch=[t for t in types if t is not None], blocks=blocks, name=KERNEL_NAME, interpret=interpret,
    )  # fmt: skip
    return out.reshape(s_q, h_q, D_V), max_logits.reshape(s_q, h_q), lse.reshape(s_q, h_q)
