"""Hopper kernel of paged_mla_attention (Pallas, Mosaic GPU): the attention core and a producer that dequantises.

`pallas_kernels/mosaic_block.py` says how a block works. Its third warpgroup, written here, copies Q and turns the
bytes of the selected slots into the bf16 tiles. An item's rounds are those of the main pool, then those of the extra
one; the last of each may be partly empty. V4 pools go through a ring (`mosaic_paged.convert`), whatever else there is
straight through registers (`fetch`).

Few query rows would leave most of the GPU idle. Then a row's rounds are dealt out to several items, each of which
writes an output of its own, in float32 and without sink; they are merged by their lse. A *part* is such a share.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it in the middle of a trace
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention_math import apply_attn_sink, merge_parts
from pallas_kernels.common import cdiv
from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.mosaic_attention import attend
from pallas_kernels.mosaic_block import (
    D_V,
    HEADS,
    LEFT0,
    LEFT1,
    MASKS,
    PAIR,
    RIGHT0,
    RIGHT1,
    SMS,
    Items,
    Plan,
    Shared,
    feed,
    launch,
    open_shared,
    shared_types,
    wait_until_free,
)
from pallas_kernels.mosaic_paged import UNIT, HopperPaged, Pool
from pallas_kernels.mosaic_paged_interpreted import InterpretedPaged

KERNEL_NAME = "paged_mla_attention"
REGISTERS = (216, 72)
"""Per thread of a computing warpgroup and of the producer, which holds 16 values in the making."""
MOST_PARTS = 32
"""Parts of a query: see `merge_parts`."""
REFILLS = ((LEFT0, 0, False), (RIGHT1, 1, True), (RIGHT0, 0, True), (LEFT1, 1, False))
"""The half tiles of a round in the order in which they become free: barrier, tile, whether it is the right half."""


def unsupported(q: jax.Array, scopes, *, d_v: int) -> str | None:
    """Why the kernel cannot serve these arguments, or None; scopes: `(pages, layout, page_size)` of each pool."""
    h_q = q.shape[1]
    if q.dtype != jnp.bfloat16:
        return f"the tensor cores multiply bfloat16 here, got {q.dtype} (implementation='xla' serves it)."
    for pages, layout, _ in scopes:
        if layout.dtype != jnp.bfloat16:
            return f"rows of layout {layout!r} are {layout.dtype.name}, the tensor cores multiply bfloat16 here."
        if pages.size >= UNIT * 2**32:
            return f"it counts {UNIT} bytes at a time, in 32 bits: pools below 64 GiB, got {pages.size} bytes."
    if d_v != D_V:
        return f"it serves d_v 512, got d_v={d_v}."
    if h_q > 128:
        return f"it serves up to 128 heads, got h_q={h_q}."
    return None


def parts_of_query(b: int, h_q: int, columns: tuple[int, ...]) -> int:
    """Into how many parts a query's rounds are dealt out; columns: index columns of each scope."""
    items, rounds = b * cdiv(h_q, HEADS), sum(cdiv(n, PAIR) for n in columns)
    # As many as there are blocks for, each with a round at least, and as `merge_parts` can take.
    parts = max(1, min(SMS // items, rounds, MOST_PARTS))
    # Outputs in float32 and their merging cost what two rounds do (version 3, H200, 64 heads, 128 + 512 columns: 8 rows
    # take 17.7 us in five parts, 32.1 us in one; 64 rows 35.4 us in two, 34.6 us in one).
    return parts if rounds - cdiv(rounds, parts) > 2 else 1


def produce(
    hw, shared: Shared, stage, plan: Plan, items: Items, pools: tuple[Pool, ...], q_ref, pages_refs, index_refs
):
    """Runs as warpgroup 2: fills Q, the KV tiles and the masks. stage: for V4 pools, the ring; else None."""
    barriers = shared.barriers
    buffers = {LEFT0: shared.left0, RIGHT0: shared.right0, LEFT1: shared.left1, RIGHT1: shared.right1}
    layout, halves = pools[0].layout, [half for _, *half in REFILLS]

    def load(row, extra, first, end):
        return extra, hw.load_slots(index_refs, extra, row, first, end)

    def begin(loaded):
        extra, slots = loaded
        units, scales = hw.locate(slots, extra, pools), None
        if stage is not None:
            scales = hw.load_scales(pages_refs, slots, extra, pools)
            hw.request(stage, halves, pages_refs, units, extra, layout)
        return extra, slots, units, scales

    def fill(r, state, upcoming):
        extra, slots, units, scales = state
        next_extra, next_slots = upcoming
        next_units, next_scales = units, scales
        for j, (k, tile, right) in enumerate(REFILLS):
            wait_until_free(hw, shared, k, r)
            buffer = buffers[k].at[0]
            if j == 3:
                next_units = hw.locate(next_slots, next_extra, pools)
            if stage is None:
                for scope, (pages_ref, pool) in enumerate(zip(pages_refs, pools)):
                    fetch = functools.partial(hw.fetch, pages_ref, pool, slots, tile, right, buffer, barriers, k)
                    pl.when(extra == scope)(fetch)
            else:
                if j == 3:
                    next_scales = hw.load_scales(pages_refs, next_slots, next_extra, pools)
                now, then = (units, extra), (next_units, next_extra)
                hw.convert(stage, lax.rem(r, 2), halves, j, pages_refs, now, then, layout, scales, buffer, barriers, k)
            if k == RIGHT1:
                # By freeing these two, both warpgroups have told that they have read the mask before.
                hw.write_mask(shared.mask, jnp.where(units == -1, -1, 0), 1)
                hw.arrive(barriers, MASKS + 0)
                hw.arrive(barriers, MASKS + 1)
        return next_extra, next_slots, next_units, next_scales

    feed(hw, shared, plan, items, q_ref, load, begin, fill)


@functools.partial(jax.jit, static_argnames=("layouts", "sm_scale", "d_v", "interpret"))
def paged_mla_attention(
    q: jax.Array,
    pages: tuple,
    rows: tuple,
    attn_sink: jax.Array | None,
    *,
    layouts: tuple[tuple[KVLayout, int], ...],
    sm_scale: float,
    d_v: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.paged_mla_attention`; no dimension is 0. Returns (out, lse).

    Args:
      pages, layouts: of the main pool and perhaps the extra one; a layout comes with the page size.
      rows: ((indices, topk_length), ...), one pair per pool.
    """
    b, h_q, d = q.shape
    indices, lengths = zip(*rows)
    columns = tuple(x.shape[1] for x in indices)
    plan = Plan(b, h_q, columns, parts_of_query(b, h_q, columns))
    sink = attn_sink if plan.parts == 1 else None
    hw = InterpretedPaged() if interpret else HopperPaged()
    blocks = plan.blocks(interpret)
    pools = tuple(Pool(*layout, *x.shape) for layout, x in zip(layouts, pages))
    types = shared_types(hw, d)
    through_ring = all(pool.layout == KVLayout.V4 for pool in pools)
    scratch = [t for t in types if t is not None] + ([hw.stage_scratch()] if through_ring else [])

    def kernel(q_ref, *refs):
        refs = list(refs)
        pages_refs, index_refs = ([refs.pop(0) for _ in pools] for _ in range(2))
        length_refs = [None if n is None else refs.pop(0) for n in lengths]
        sink_ref = None if sink is None else refs.pop(0)
        stage = refs.pop() if through_ring else None
        outputs, shared = refs[:3], open_shared(hw, types, refs[3:])
        items = plan.items(hw, length_refs, q_ref, shared.words, lax.axis_index("block"), blocks)
        attend(
            hw, shared, items, outputs, sink_ref,
            lambda: produce(hw, shared, stage, plan, items, pools, q_ref, pages_refs, index_refs),
            d=d, h_q=h_q, sm_scale=sm_scale, registers=REGISTERS,
        )  # fmt: skip

    optional = [x for x in (*lengths, sink) if x is not None]
    out, _, lse = launch(
        kernel, (q.reshape(b * h_q, d), *pages, *indices, *optional), s_q=b * plan.parts,
        h_q=h_q, dtype=jnp.bfloat16 if plan.parts == 1 else jnp.float32, scratch=scratch, blocks=blocks,
        name=KERNEL_NAME, interpret=interpret,
    )  # fmt: skip
    if plan.parts == 1:
        return out.reshape(b, h_q, D_V), lse.reshape(b, h_q)
    out, lse = merge_parts(out.reshape(plan.parts, b, h_q, D_V), lse.reshape(plan.parts, b, h_q))
    if attn_sink is not None:
        out = apply_attn_sink(out, lse, attn_sink)
    return out.astype(jnp.bfloat16), lse
