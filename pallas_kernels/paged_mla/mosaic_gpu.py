"""Hopper kernel of paged_mla_attention (Pallas, Mosaic GPU): the attention core and a producer that dequantises.

`pallas_kernels/mosaic_attention.py` says how a block works. Its third warpgroup, written here, copies Q and turns the
bytes of the selected slots into the bf16 tiles. An item's rounds are those of the main pool, then those of the extra
one; the last of each may be partly empty. V4 pools go through a ring (`mosaic_paged.convert`), whatever else there is
straight through registers (`fetch`).

Few query rows would leave most of the GPU idle. Then a row's rounds are dealt out to several items, each of which
writes an output of its own, in float32 and without sink; they are merged by their lse. A *part* is such a share.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it in the middle of a trace
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention_math import apply_attn_sink, merge_parts
from pallas_kernels.common import cdiv
from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.mosaic_attention import (
    D_V,
    FREE,
    HEADS,
    LEFT0,
    LEFT1,
    MASKS,
    PAIR,
    QUERY,
    RIGHT0,
    RIGHT1,
    SMS,
    Items,
    Shared,
    attend,
    launch,
    open_shared,
    shared_types,
)
from pallas_kernels.mosaic_paged import UNIT, HopperPaged, Pool
from pallas_kernels.mosaic_paged_interpreted import InterpretedPaged

KERNEL_NAME = "paged_mla_attention"
INTERPRETED_BLOCKS = 2  # few, so that small tests make a block walk over several items, too
REGISTERS = (216, 72)
"""Per thread of a computing warpgroup and of the producer, which holds 16 values in the making."""
REFILLS = ((LEFT0, 0, False), (RIGHT1, 1, True), (RIGHT0, 0, True), (LEFT1, 1, False))
"""The half tiles of a round in the order in which they become free: barrier, tile, whether it is the right half."""
FIRST_PIECE = (0, 8, 18, 28)
"""Pieces of V4 rows in the half tiles of a round before each of them."""


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
    # As many as there are blocks for, each with a round at least.
    parts = max(1, min(SMS // items, rounds))
    # Outputs in float32 and their merging cost what two rounds do (H200, 64 heads, 128 + 512 columns: 8 rows take
    # 17.7 us in five parts, 32.1 us in one; 64 rows 35.4 us in two, 34.6 us in one).
    return parts if rounds - cdiv(rounds, parts) > 2 else 1


class _Plan(NamedTuple):
    """Which rounds a block does."""

    b: int
    h_q: int
    columns: tuple[int, ...]  # index columns of each scope
    parts: int

    def rounds(self, lengths):
        """(first round, rounds, rounds of each scope) of an item; lengths: what `Items.request` gave."""
        each = [lax.div(jnp.clip(n, 0, most) + (PAIR - 1), PAIR) for n, most in zip(lengths, self.columns)]
        total = sum(each)
        if self.parts == 1:
            return 0, total, each
        part = lengths[-1]
        first = lax.div(part * total, self.parts)
        return first, lax.div((part + 1) * total, self.parts) - first, each

    def read(self, lengths, i):
        """(scope, first column, end of columns) of round i of an item; past its last round nothing is left to read."""
        first, count, each = self.rounds(lengths)
        i = jnp.where(i < count, first + i, sum(each))
        limits = [jnp.clip(n, 0, most) for n, most in zip(lengths, self.columns)]
        if len(each) == 1:
            return jnp.int32(0), i * PAIR, limits[0]
        extra = i >= each[0]
        first = (i - jnp.where(extra, each[0], 0)) * PAIR
        return extra.astype(jnp.int32), first, jnp.where(extra, limits[1], limits[0])

    def items(self, hw, length_refs, some_global_ref, block, blocks) -> Items:
        """Items of block number `block` of `blocks`; length_refs: one per scope, [b] int32, or None.

        The blocks of a team, one for every 64 heads, take the same queries at the same time.
        """
        team_size = cdiv(self.h_q, HEADS)
        teams, team = blocks // team_size, lax.div(block, team_size)
        queries = self.b * self.parts
        zero = hw.hidden_zero(some_global_ref)

        def query(i):
            return jnp.minimum(team + i * teams, queries - 1)

        def request(i):
            row = lax.rem(query(i), self.b)
            lengths = [
                zero + n if ref is None else hw.load_scalar(ref, row) for n, ref in zip(self.columns, length_refs)
            ]
            return (*lengths, lax.div(query(i), self.b)) if self.parts > 1 else tuple(lengths)

        def pairs(lengths):
            # The zero hides what the compilers know of the number: known to be >= 1, it makes ptxas serialise wgmma.
            return jnp.maximum(self.rounds(lengths)[1], 1) + zero

        return Items(
            count=lax.div(queries - team + (teams - 1), teams), head=lax.rem(block, team_size) * HEADS, query=query,
            request=request, pairs=pairs,
        )  # fmt: skip


def produce(
    hw, shared: Shared, stage, items: Items, plan: _Plan, pools: tuple[Pool, ...], q_ref, pages_refs, index_refs
):
    """Runs as warpgroup 2: fills Q, the KV tiles and the masks. stage: for V4 pools, the ring; else None."""
    barriers, h_q = shared.barriers, plan.h_q
    buffers = {LEFT0: shared.left0, RIGHT0: shared.right0, LEFT1: shared.left1, RIGHT1: shared.right1}
    layout = pools[0].layout

    def load(it, lengths, i):
        """(scope, slots) of round i of an item; the slots are on their way."""
        extra, first, limit = plan.read(lengths, i)
        return extra, hw.load_slots(index_refs, extra, lax.rem(items.query(it), plan.b), first, limit)

    def round_(i, carry, it, done, lengths, next_lengths, n):
        extra, slots, units, scales = carry
        r, ends = done + i, i + 1 >= n
        turn = lax.rem(r, 2)
        ahead = [jnp.where(ends, b, a) for a, b in zip(lengths, next_lengths)]
        next_extra, next_slots = load(it + jnp.where(ends, 1, 0), ahead, jnp.where(ends, 0, i + 1))
        next_units, next_scales = units, scales
        for j, (k, tile, right) in enumerate(REFILLS):
            pl.when(r > 0)(lambda k=k: hw.wait(barriers, FREE + k, lax.rem(r + 1, 2)))
            buffer = buffers[k].at[0]
            if j == 3:
                next_units = hw.locate(next_slots, next_extra, pools)
            if stage is None:
                for scope, (pages_ref, pool) in enumerate(zip(pages_refs, pools)):
                    fetch = functools.partial(hw.fetch, pages_ref, pool, slots, tile, right, buffer, barriers, k)
                    pl.when(extra == scope)(fetch)
            else:
                half, following = (units, extra, tile, right), (units, extra, *REFILLS[(j + 1) % 4][1:])
                if j == 3:
                    next_scales = hw.load_scales(pages_refs, next_slots, next_extra, pools)
                    following = next_units, next_extra, *REFILLS[0][1:]
                hw.convert(
                    stage, turn, FIRST_PIECE[j], pages_refs, half, following, layout, scales, buffer, barriers, k
                )
            if k == RIGHT1:
                # By freeing these two, both warpgroups have told that they have read the mask before.
                hw.write_mask(shared.mask, jnp.where(units == -1, -1, 0), 1)
                hw.arrive(barriers, MASKS + 0)
                hw.arrive(barriers, MASKS + 1)
        return next_extra, next_slots, next_units, next_scales

    def one_item(it, carry):
        done, lengths, next_lengths, *state = carry
        later_lengths = items.request(it + 2)
        row = lax.rem(items.query(it), plan.b) * h_q

        pl.when(it > 0)(lambda: hw.wait(barriers, FREE + QUERY, lax.rem(it + 1, 2)))
        q_rows = hw.rows_to_copy(hw.consecutive_tokens(row + items.head, h_q - items.head), 0)
        hw.copy_rows(q_ref, q_rows, 0, shared.q.at[0], barriers, QUERY, keep=False)
        n = items.pairs(lengths)
        state = lax.fori_loop(0, n, lambda i, state: round_(i, state, it, done, lengths, next_lengths, n), tuple(state))
        return done + n, next_lengths, later_lengths, *state

    lengths = items.request(jnp.int32(0))
    extra, slots = load(jnp.int32(0), lengths, jnp.int32(0))
    units, scales = hw.locate(slots, extra, pools), None
    if stage is not None:
        scales = hw.load_scales(pages_refs, slots, extra, pools)
        hw.request(stage, jnp.int32(0), 0, pages_refs, (units, extra, *REFILLS[0][1:]), layout)
    state = jnp.int32(0), lengths, items.request(jnp.int32(1)), extra, slots, units, scales
    done, *_ = lax.fori_loop(0, items.count, one_item, state)
    # Every phase is waited for, the last ones here.
    hw.wait(barriers, FREE + QUERY, lax.rem(items.count + 1, 2))
    for k, _, _ in REFILLS:
        hw.wait(barriers, FREE + k, lax.rem(done + 1, 2))


def paged_mla_attention(
    q: jax.Array,
    scopes,
    rows,
    attn_sink: jax.Array | None,
    *,
    sm_scale: float,
    d_v: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.paged_mla_attention`; no dimension is 0. Returns (out, lse).

    Args:
      scopes: ((pages, layout, page_size), ...), the main pool and perhaps the extra one.
      rows: ((indices, topk_length), ...), one pair per scope.
    """
    b, h_q, d = q.shape
    indices, lengths = zip(*rows)
    columns = tuple(x.shape[1] for x in indices)
    plan = _Plan(b, h_q, columns, parts_of_query(b, h_q, columns))
    sink = attn_sink if plan.parts == 1 else None
    hw = InterpretedPaged() if interpret else HopperPaged()
    team_size = cdiv(h_q, HEADS)
    blocks = team_size * min(b * plan.parts, max(1, (INTERPRETED_BLOCKS if interpret else SMS) // team_size))
    pools = tuple(Pool(layout, page_size, *pages.shape) for pages, layout, page_size in scopes)
    types = shared_types(hw, d)
    through_ring = all(layout == KVLayout.V4 for _, layout, _ in scopes)
    scratch = [t for t in types if t is not None] + ([hw.stage_scratch()] if through_ring else [])

    def kernel(q_ref, *refs):
        refs = list(refs)
        pages_refs, index_refs = ([refs.pop(0) for _ in scopes] for _ in range(2))
        length_refs = [None if n is None else refs.pop(0) for n in lengths]
        sink_ref = None if sink is None else refs.pop(0)
        stage = refs.pop() if through_ring else None
        outputs, shared = refs[:3], open_shared(hw, types, refs[3:])
        items = plan.items(hw, length_refs, q_ref, lax.axis_index("block"), blocks)
        attend(hw, shared, items, outputs, sink_ref, d=d, h_q=h_q, sm_scale=sm_scale, registers=REGISTERS[0])

        @pl.when(lax.axis_index("warpgroup") == 2)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            produce(hw, shared, stage, items, plan, pools, q_ref, pages_refs, index_refs)

    optional = [x for x in (*lengths, sink) if x is not None]
    out, _, lse = launch(
        kernel, (q.reshape(b * h_q, d), *(pages for pages, _, _ in scopes), *indices, *optional), s_q=b * plan.parts,
        h_q=h_q, dtype=jnp.bfloat16 if plan.parts == 1 else jnp.float32, scratch=scratch, blocks=blocks,
        name=KERNEL_NAME, interpret=interpret,
    )  # fmt: skip
    if plan.parts == 1:
        return out.reshape(b, h_q, D_V), lse.reshape(b, h_q)
    out, lse = merge_parts(out.reshape(plan.parts, b, h_q, D_V), lse.reshape(plan.parts, b, h_q))
    if attn_sink is not None:
        out = apply_attn_sink(out, lse, attn_sink)
    return out.astype(jnp.bfloat16), lse
