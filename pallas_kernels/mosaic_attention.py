"""The attention core of the Hopper kernels: two warpgroups that attend, for whatever third one fills the KV tiles.

A block has three warpgroups. A *producer* (of the op: it gathers, or it dequantises) fills shared memory with Q, KV
tiles and masks; warpgroups 0 and 1, written here, compute. An item is one query times 64 heads. The grid is persistent;
`Plan` says which items a block takes. For more than 64 heads, neighbouring blocks work on the same query's KV rows at
the same time.

Tokens go in pairs of 64-row tiles. Warpgroup w forms the logits S_w of tile w (Q and K from shared memory); both
exchange running maxima and probabilities P_w through shared memory; and warpgroup w accumulates output columns
[256 w, 256 w + 256) for both tiles: own P from registers, the other one from shared memory. That split is the one of
FlashMLA's sparse prefill kernel for sm_90 (`csrc/sm90/prefill/sparse`): neither warpgroup could hold 64 x 512 float32.

Shared memory: Q (64 x d), four KV buffers (left: columns 0..255, right: the rest, of tiles 0 and 1), P1 and P0 (d 576:
P0 lies in the RoPE columns of tile 0, which only warpgroup 0 reads and has read by then).

Barriers, in the order of their numbers (`r` counts rounds of this block, `it` its items):
  LEFT0, RIGHT0, LEFT1, RIGHT1  producer -> core: a KV buffer has landed; phase r
  QUERY                         producer -> core: Q has landed; phase it
  FREE + the same five          core -> producer: the buffer is free again (Q: in the last round of an item)
  MASKS + w                     producer -> warpgroup w: the mask of tile w is written; phase r
  TURN + 0..3                   between the two, phase r: maximum of tile 0 stored; of both stored; P0 stored; P1 stored

The running maximum is only a reference for exp2. It starts as the first tile's maximum and moves, in whole steps, when
a logit exceeds it by more than 8 (log2 units). Most rounds leave it alone: no warp rescales its output, and P0 is
stored before warpgroup 1 has agreed. Factors between references are powers of two: rescaling P rounds nothing.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import cdiv
from pallas_kernels.mosaic import ROWS, TILED

D_V, HALF = 512, 256
PAIR = 2 * ROWS
"""Tokens per round."""
HEADS = 64
"""Heads per item."""
SMS = 132
"""Streaming multiprocessors of an H100 SXM or H200: blocks of the persistent grid. Right on any other number, too."""
ITEM_ROUNDS = 2
"""What start and end of an item cost, in rounds (512, 64, 640 takes 19 µs an item, 128 tokens more 2.7 µs; H200)."""
LEFT0, RIGHT0, LEFT1, RIGHT1, QUERY = range(5)
_NAMES = "left 0", "right 0", "left 1", "right 1", "Q"
FREE, MASKS, TURN, BARRIERS = 5, 10, 12, 16

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_LOWEST = -1e30  # start of the reference: finite, so that exp2(m - m) is 1
_TO_INTEGER = 1.5 * 2.0**23  # added and subtracted: rounds to an integer
_SLACK = 8.0  # log2 of how far a logit may exceed the reference: P stays below 256, its rounding is relative
_WGMMA = plgpu.Layout.WGMMA
_PER_ROW, _PER_COLUMN = _WGMMA.reduce(1), _WGMMA.reduce(0)


class Shared(NamedTuple):
    """Shared memory and barriers of a block."""

    q: Any
    left0: Any
    right0: Any
    left1: Any
    right1: Any
    p1: Any
    p0: Any  # None for d 576
    words: Any  # f32: see the properties
    barriers: Any

    # One allocation, since each takes a multiple of 1 KiB and d 576 leaves 3 KiB.
    def _rows(self, i):
        return self.words.at[pl.ds(ROWS * i, ROWS)]

    mask = property(lambda self: self.words.at[pl.ds(0, PAIR)])  # 0 or -inf for each token
    maxima = property(lambda self: (self._rows(2), self._rows(3)))  # the reference after tile 0, after tile 1
    sums = property(lambda self: (self._rows(4), self._rows(5)))  # row sums of the two warpgroups
    highest1 = property(lambda self: self._rows(6))  # largest logits of warpgroup 1's tiles


def shared_types(hw, d: int) -> Shared:
    """Scratch types of `Shared` for keys of d = 512 or 576 numbers."""

    def tile(width):
        return plgpu.SMEM((1, ROWS, width), jnp.bfloat16, transforms=TILED)

    return Shared(
        tile(d), tile(HALF), tile(d - HALF), tile(HALF), tile(d - HALF), tile(ROWS), tile(ROWS) if d == D_V else None,
        plgpu.SMEM((7 * ROWS + hw.barrier_words(BARRIERS),), jnp.float32), hw.barrier_scratch(BARRIERS),
    )  # fmt: skip


def open_shared(hw, types: Shared, refs) -> Shared:
    """The block's `Shared`, from references to the scratch of `types` that is not None. All threads meet in here."""
    refs = iter(refs)
    shared = Shared(*(None if t is None else next(refs) for t in types))
    if shared.barriers is None:
        shared = shared._replace(barriers=shared.words.at[pl.ds(7 * ROWS, hw.barrier_words(BARRIERS))])
    hw.open_barriers(shared.barriers, BARRIERS, landing=QUERY + 1)
    return shared


class Items(NamedTuple):
    """The items of one block: 64 heads, from `head` on, of `count` queries."""

    count: Any  # traced; may be 0
    head: Any
    query: Callable  # item number -> row of the outputs; numbers past the last one give some row
    request: Callable  # item number -> lengths of its query, asked for early; an opaque tuple
    pairs: Callable  # that tuple -> rounds, at least 1


class Plan(NamedTuple):
    """What the blocks of a kernel do.

    A query's index columns come in one or two *scopes*. Its rounds are those of the first scope, then those of the
    second, 128 columns each; the last of each may be partly empty. With `parts` > 1 its rounds are dealt out to so many
    items, part p of query i being row p * queries + i of the outputs.
    """

    queries: int
    h_q: int
    columns: tuple[int, ...]  # index columns of each scope
    parts: int = 1

    @property
    def team_size(self) -> int:
        """Blocks that take the same queries at the same time, one for every 64 heads."""
        return cdiv(self.h_q, HEADS)

    def blocks(self, most: int) -> int:
        """Blocks of the grid: whole teams, at most `most` blocks and one for every item."""
        return self.team_size * min(self.queries * self.parts, max(1, most // self.team_size))

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

    def items(self, hw, length_refs, some_global_ref, scratch_ref, block, blocks: int) -> Items:
        """Items of block number `block` of `blocks`; all threads of the block meet in here.

        Teams take every so manieth row or, where the number of columns varies, neighbours that are a fair share of the
        work.

        Args:
          length_refs: for each scope [queries] int32 columns that count, clamped to 0..columns; None: all of them.
          some_global_ref: any array in global memory.
          scratch_ref: shared memory that nothing else uses yet.
        """
        teams, team = blocks // self.team_size, lax.div(block, self.team_size)
        rows = self.queries * self.parts
        zero = hw.hidden_zero(some_global_ref)
        if self.parts > 1 or all(ref is None for ref in length_refs):
            first, stride, count = team, teams, lax.div(rows - team + (teams - 1), teams)
        else:
            first, end = hw.share(scratch_ref, length_refs, self.columns, ITEM_ROUNDS, team, teams)
            stride, count = 1, end - first

        def query(i):
            return jnp.minimum(first + i * stride, rows - 1)

        def request(i):
            row = self.row(query(i))
            lengths = [
                zero + n if ref is None else hw.load_scalar(ref, row) for n, ref in zip(self.columns, length_refs)
            ]
            return (*lengths, lax.div(query(i), self.queries)) if self.parts > 1 else tuple(lengths)

        def pairs(lengths):
            # The zero hides what the compilers know of the number: known to be >= 1, it makes ptxas serialise wgmma.
            return jnp.maximum(self.rounds(lengths)[1], 1) + zero

        return Items(count, lax.rem(block, self.team_size) * HEADS, query, request, pairs)

    def row(self, query):
        """Row of q, of the indices and of the lengths."""
        return query if self.parts == 1 else lax.rem(query, self.queries)


def wait_until_free(hw, shared: Shared, k: int, count):
    """Waits, in warpgroup 2, until buffer k may be filled for round (Q: item) `count`."""
    with jax.named_scope(f"wait for {_NAMES[k]}"):
        pl.when(count > 0)(lambda: hw.wait(shared.barriers, FREE + k, lax.rem(count + 1, 2)))


def feed(hw, shared: Shared, plan: Plan, items: Items, q_ref, load: Callable, begin: Callable, fill: Callable):
    """Runs as warpgroup 2: fills Q, and lets the op fill the KV tiles and the masks, round by round.

    Args:
      q_ref: [queries * h_q, d] bf16.
      load: (row, scope, first column, end of columns) -> what a round needs to know, on its way from global memory.
      begin: what `load` gave for the first round -> the op's state.
      fill: (r, the op's state, what `load` gave for the next round) -> the state for that. It fills the four buffers
        and the masks of round r, each after `wait_until_free`.
    """

    def loaded(it, lengths, i):
        return load(plan.row(items.query(it)), *plan.read(lengths, i))

    def first_head(it):
        return plan.row(items.query(it)) * plan.h_q + items.head

    def one_item(it, carry):
        done, lengths, next_lengths, state = carry
        later_lengths = items.request(it + 2)
        wait_until_free(hw, shared, QUERY, it)
        q_rows = hw.rows_to_copy(hw.consecutive_tokens(first_head(it), plan.h_q - items.head), 0)
        hw.copy_rows(q_ref, q_rows, 0, shared.q.at[0], shared.barriers, QUERY, keep=False)
        # Q has no second buffer: it lands while nobody computes.
        hw.prefetch_rows(q_ref, first_head(it + 1), jnp.minimum(plan.h_q - items.head, HEADS))
        n = items.pairs(lengths)

        def round_(i, state):
            ends = i + 1 >= n
            ahead = [jnp.where(ends, b, a) for a, b in zip(lengths, next_lengths)]
            return fill(done + i, state, loaded(it + jnp.where(ends, 1, 0), ahead, jnp.where(ends, 0, i + 1)))

        return done + n, next_lengths, later_lengths, lax.fori_loop(0, n, round_, state)

    lengths = items.request(jnp.int32(0))
    state = begin(loaded(jnp.int32(0), lengths, jnp.int32(0)))
    carry = jnp.int32(0), lengths, items.request(jnp.int32(1)), state
    done, *_ = lax.fori_loop(0, items.count, one_item, carry)
    # Every phase is waited for, the last ones here.
    wait_until_free(hw, shared, QUERY, items.count)
    for k in (LEFT0, RIGHT1, RIGHT0, LEFT1):
        wait_until_free(hw, shared, k, done)


def attend(
    hw,
    shared: Shared,
    items: Items,
    outputs,
    sink_ref,
    produce: Callable,
    *,
    d: int,
    h_q: int,
    sm_scale: float,
    registers: tuple[int, int],
):
    """Runs a block: warpgroups 0 and 1 attend to what `produce()`, warpgroup 2, delivers, and write the outputs.

    Args:
      hw: `mosaic.Hopper()` or `mosaic.Interpreted()`.
      outputs: references out [s_q * h_q, 512] bf16 or f32, max_logits and lse [s_q * h_q] f32.
      sink_ref: [h_q] f32, natural units, or None.
      registers: per thread of warpgroups 0 and 1, and of warpgroup 2.
    """
    out_ref, max_ref, lse_ref = outputs
    scale = float(sm_scale * _LOG2E)

    # Always 0, but another 0 each round as far as the compilers know. All buffers are indexed with it: otherwise the
    # descriptors of a round's wgmma (about 36, 64 bits each) are hoisted out of the loop, and spilled.
    def epoch(i):
        return lax.shift_right_logical(i, 28)

    def q_left(z):
        return shared.q.at[z, :, pl.ds(0, HALF)]

    def q_right(z):
        return shared.q.at[z, :, pl.ds(HALF, d - HALF)]

    def v_right(ref, z):
        return ref.at[z] if d == D_V else ref.at[z, :, pl.ds(0, HALF)]

    def p0(z):
        return shared.p0.at[z] if d == D_V else shared.right0.at[z, :, pl.ds(HALF, ROWS)]

    def read_rows(ref):
        return plgpu.load(ref, layout=_PER_ROW, optimized=False)

    def spread(x, n):
        return lax.broadcast_in_dim(x, (ROWS, n), [0])

    def zeros(n):
        return plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), _WGMMA)

    def row_of(value):
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), _PER_ROW)

    def masked(s, w):
        mask = plgpu.load(shared.mask.at[pl.ds(ROWS * w, ROWS)], layout=_PER_COLUMN, optimized=False)
        return s * scale + lax.broadcast_in_dim(mask, (ROWS, ROWS), [1])

    def wait(k, count):
        hw.wait(shared.barriers, k, lax.rem(count, 2))

    def arrive(k):
        hw.arrive(shared.barriers, k)

    def multiply_k(acc, q, buffer, k, r, z):
        wait(k, r)
        hw.wgmma(acc, q(z), hw.transpose(buffer.at[z]))

    def reference(m, highest):
        steps = (highest - m + _TO_INTEGER) - _TO_INTEGER
        return jnp.where(highest > m + _SLACK, jnp.where(m == _LOWEST, highest, m + steps), m)

    def rescale(o, m, new_m, factor):
        return lax.cond(hw.any_differs(m, new_m) != 0, lambda o: o * spread(factor, HALF), lambda o: o, o)

    def finish(w, o, m, l, query):
        """Normalises and stores this warpgroup's half of the output; m in log2 units. Returns (some key, lse)."""
        total = hw.sum_quads(l) + read_rows(shared.sums[1 - w])
        some = total > 0.0
        safe = jnp.where(some, total, 1.0)
        weight = safe
        if sink_ref is not None:
            weight = safe + jnp.exp2(hw.load_heads(sink_ref, items.head, h_q) * _LOG2E - m)
        o = (o * spread(jnp.where(some, 1.0 / weight, 0.0), HALF)).astype(out_ref.dtype)
        hw.store_rows(o, out_ref, query, items.head, h_q, w * HALF)
        return some, jnp.log(safe) + m * _LN2

    def for_items(one_item):
        """Calls one_item(item, its rounds, rounds before it) for all items."""

        def step(it, carry):
            done, n = carry
            upcoming = items.request(it + 1)
            one_item(it, n, done)
            return done + n, items.pairs(upcoming)

        lax.fori_loop(0, items.count, step, (jnp.int32(0), items.pairs(items.request(0))))

    def warpgroup0():
        def round_(i, carry, it, done, last):
            o, m, l, highest, s = carry
            r, z = done + i, epoch(i)
            with jax.named_scope("softmax"):
                wait(MASKS + 0, r)
                s = masked(s, 0)
                highest0 = s.max(axis=1)
                highest = jnp.maximum(highest, highest0)
                m0 = reference(m, highest0)
                shared.maxima[0][...] = m0
                arrive(TURN + 0)
                a = jnp.exp2(m - m0)
                p = jnp.exp2(s - spread(m0, ROWS))
                l = l * a + hw.quad_sums(p)
                o = rescale(o, m, m0, a)
                p_own = p.astype(jnp.bfloat16)

            def own_tile(accs):
                hw.wgmma(accs[0], p_own, shared.left0.at[z])
                p0(z)[...] = p_own
                hw.wgmma_wait(0)
                arrive(FREE + LEFT0)  # before warpgroup 1 has its maximum: the next gather starts early
                wait(TURN + 1, r)
                m = read_rows(shared.maxima[1])
                a = jnp.exp2(m0 - m)

                @pl.when(hw.any_differs(m0, m) != 0)
                def _():
                    p0(z)[...] = p_own * spread(a, ROWS).astype(jnp.bfloat16)

                if last:
                    shared.sums[0][...] = hw.sum_quads(l * a)
                hw.fence()
                arrive(TURN + 2)

            with jax.named_scope("own tile"):
                (o,) = hw.accumulate(own_tile, o)
            with jax.named_scope("agree"):
                m = read_rows(shared.maxima[1])
                a = jnp.exp2(m0 - m)
                l = l * a
                o = rescale(o, m0, m, a)
                wait(TURN + 3, r)
            if last:
                with jax.named_scope("other tile"):
                    (o,) = hw.accumulate(lambda accs: hw.wgmma(accs[0], shared.p1.at[z], shared.left1.at[z]), o)
                arrive(FREE + LEFT1)
                return o, m, l, highest

            def other_tile_and_next(accs):
                hw.wgmma(accs[0], shared.p1.at[z], shared.left1.at[z])
                multiply_k(accs[1], q_left, shared.left0, LEFT0, r + 1, z)
                hw.wgmma_wait(1)
                arrive(FREE + LEFT1)
                multiply_k(accs[1], q_right, shared.right0, RIGHT0, r + 1, z)

            with jax.named_scope("other tile, next logits"):
                o, s = hw.accumulate(other_tile_and_next, o, zeros(ROWS))
            return o, m, l, highest, s

        def one_item(it, n, done):
            with jax.named_scope("wait for Q"):
                wait(QUERY, it)

            def logits(accs):
                multiply_k(accs[0], q_left, shared.left0, LEFT0, done, epoch(it))
                multiply_k(accs[0], q_right, shared.right0, RIGHT0, done, epoch(it))

            with jax.named_scope("logits"):
                (s,) = hw.accumulate(logits, zeros(ROWS))
            carry = zeros(HALF), row_of(_LOWEST), row_of(0.0), row_of(-jnp.inf), s
            carry = lax.fori_loop(0, n - 1, functools.partial(round_, it=it, done=done, last=False), carry)
            o, m, l, highest = round_(n - 1, carry, it, done, last=True)
            with jax.named_scope("output"):
                some, _ = finish(0, o, m, l, items.query(it))
            highest = jnp.maximum(highest, read_rows(shared.highest1)) * _LN2
            hw.store_heads(jnp.where(some, highest, -jnp.inf), max_ref, items.query(it), items.head, h_q)

        for_items(one_item)

    def warpgroup1():
        def round_(i, carry, n, done):
            o, m, l, highest = carry
            r, z = done + i, epoch(i)

            def logits(accs):
                multiply_k(accs[0], q_right, shared.right1, RIGHT1, r, z)
                multiply_k(accs[0], q_left, shared.left1, LEFT1, r, z)

            with jax.named_scope("logits"):
                (s,) = hw.accumulate(logits, zeros(ROWS))
            with jax.named_scope("softmax"):
                wait(MASKS + 1, r)
                s = masked(s, 1)
                highest1 = s.max(axis=1)
                highest = jnp.maximum(highest, highest1)
                wait(TURN + 0, r)
                pl.when(i == n - 1)(lambda: arrive(FREE + QUERY))
                m1 = reference(read_rows(shared.maxima[0]), highest1)
                shared.maxima[1][...] = m1
                arrive(TURN + 1)
                a = jnp.exp2(m - m1)
                p = jnp.exp2(s - spread(m1, ROWS))
                l = l * a + hw.quad_sums(p)
                o = rescale(o, m, m1, a)
                p_own = p.astype(jnp.bfloat16)

            def both_tiles(accs):
                hw.wgmma(accs[0], p_own, v_right(shared.right1, z))
                shared.p1.at[z][...] = p_own
                shared.sums[1][...] = hw.sum_quads(l)
                shared.highest1[...] = highest
                hw.fence()
                arrive(TURN + 3)
                wait(TURN + 2, r)
                hw.wgmma(accs[0], p0(z), v_right(shared.right0, z))
                hw.wgmma_wait(1)
                arrive(FREE + RIGHT1)

            with jax.named_scope("both tiles"):
                (o,) = hw.accumulate(both_tiles, o)
            arrive(FREE + RIGHT0)
            return o, m1, l, highest

        def one_item(it, n, done):
            with jax.named_scope("wait for Q"):
                wait(QUERY, it)
            carry = (zeros(HALF), row_of(_LOWEST), row_of(0.0), row_of(-jnp.inf))
            o, m, l, _ = lax.fori_loop(0, n, functools.partial(round_, n=n, done=done), carry)
            with jax.named_scope("output"):
                some, lse = finish(1, o, m, l, items.query(it))
            hw.store_heads(jnp.where(some, lse, jnp.inf), lse_ref, items.query(it), items.head, h_q)

        for_items(one_item)

    def run(w, warpgroup, registers, action):
        @pl.when((lax.axis_index("warpgroup") == w) & (items.count > 0))
        def _():
            plgpu.set_max_registers(registers, action=action)
            warpgroup()

    run(0, warpgroup0, registers[0], "increase")
    run(1, warpgroup1, registers[0], "increase")
    run(2, produce, registers[1], "decrease")


def launch(kernel: Callable, operands, *, s_q: int, h_q: int, dtype, scratch, blocks: int, name: str, interpret):
    """Runs `kernel(*operand references, out, max_logits, lse, *scratch)` in `blocks` blocks of three warpgroups.

    Returns:
      out [s_q * h_q, 512] of `dtype`, max_logits and lse [s_q * h_q] float32: query and head are one axis.
    """
    rows = s_q * h_q
    logs = jax.ShapeDtypeStruct((rows,), jnp.float32)
    with jax.enable_x64(False):  # Python numbers are 32 bits wide in the kernel
        return plgpu.kernel(
            kernel,
            out_type=(jax.ShapeDtypeStruct((rows, D_V), dtype), logs, logs),
            scratch_types=scratch,
            grid=(blocks,),
            grid_names=("block",),
            num_threads=3,
            thread_name="warpgroup",
            # All ordering is this module's own; exp2 and log are the hardware's.
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,
                reduction_scratch_bytes=0,
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            ),
            interpret=interpret,
            kernel_name=name,
        )(*operands)
