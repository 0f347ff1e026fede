"""What the Hopper attention kernels have in common: a block's work, its shared memory, barriers and feeding loop.

A block has three warpgroups. Warpgroup 2, the *producer*, fills shared memory with Q, KV tiles and masks: `feed` is its
loop, and the op says how a tile is filled (it gathers, or it dequantises). Warpgroups 0 and 1 attend
(`mosaic_attention.py`). An item is one query times 64 heads. The grid is persistent; `Plan` says which items a block
takes. For more than 64 heads, neighbouring blocks work on the same query's KV rows at the same time. Tokens go in
pairs of 64-row tiles, a *round*.

Shared memory: Q (64 x d), four KV buffers (left: columns 0..255, right: the rest, of tiles 0 and 1), P1 and P0 (d 576:
P0 lies in the RoPE columns of tile 0, which only warpgroup 0 reads and has read by then).

Barriers, in the order of their numbers (`r` counts rounds of this block, `it` its items):
  LEFT0, RIGHT0, LEFT1, RIGHT1  producer -> core: a KV buffer has landed; phase r
  QUERY                         producer -> core: Q has landed; phase it
  FREE + the same five          core -> producer: the buffer is free again (Q: in the last round of an item)
  MASKS + w                     producer -> warpgroup w: the mask of tile w is written; phase r
  TURN + 0..3                   between the two, phase r: maximum of tile 0 stored; of both stored; P0 stored; P1 stored
"""

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
INTERPRETED_BLOCKS = 2
"""In the interpreter: few, so that small tests make a block walk over several items, too."""
ITEM_ROUNDS = 1
"""What start and end of an item cost, in rounds: 1.2 (d 512, 64 heads, topk 640: 19.2 µs, each round 3.1; H200)."""
LEFT0, RIGHT0, LEFT1, RIGHT1, QUERY = range(5)
_NAMES = "left 0", "right 0", "left 1", "right 1", "Q"
FREE, MASKS, TURN, BARRIERS = 5, 10, 12, 16


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

    def blocks(self, interpret) -> int:
        """Blocks of the grid: whole teams, at most one block for every SM and for every item."""
        most = INTERPRETED_BLOCKS if interpret else SMS
        return self.team_size * min(self.queries * self.parts, max(1, most // self.team_size))

    def row(self, query):
        """Row of q, of the indices and of the lengths."""
        return query if self.parts == 1 else lax.rem(query, self.queries)

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

    def one_item(it, carry):
        done, lengths, next_lengths, state = carry
        later_lengths = items.request(it + 2)
        wait_until_free(hw, shared, QUERY, it)
        first_head = plan.row(items.query(it)) * plan.h_q + items.head
        q_rows = hw.rows_to_copy(hw.consecutive_tokens(first_head, plan.h_q - items.head), 0)
        hw.copy_rows(q_ref, q_rows, 0, shared.q.at[0], shared.barriers, QUERY, keep=False)
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
