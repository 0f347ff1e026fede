"""The attention core of the Hopper kernels: warpgroups 0 and 1 of a block, see `mosaic_block.py`.

Warpgroup w forms the logits S_w of tile w (Q and K from shared memory); both exchange running maxima and probabilities
P_w through shared memory; and warpgroup w accumulates output columns [256 w, 256 w + 256) for both tiles: own P from
registers, the other one from shared memory. That split is the one of FlashMLA's sparse prefill kernel for sm_90
(`csrc/sm90/prefill/sparse`): neither warpgroup could hold 64 x 512 float32.

The running maximum is only a reference for exp2. It starts as the first tile's maximum and moves, in whole steps, when
a logit exceeds it by more than 8 (log2 units). Most rounds leave it alone: no warp rescales its output, and P0 is
stored before warpgroup 1 has agreed. Factors between references are powers of two: rescaling P rounds nothing.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import ROWS
from pallas_kernels.mosaic_block import (
    D_V,
    FREE,
    HALF,
    LEFT0,
    LEFT1,
    MASKS,
    QUERY,
    RIGHT0,
    RIGHT1,
    TURN,
    Items,
    Shared,
)

_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_LOWEST = -1e30  # start of the reference: finite, so that exp2(m - m) is 1
_TO_INTEGER = 1.5 * 2.0**23  # added and subtracted: rounds to an integer
_SLACK = 8.0  # log2 of how far a logit may exceed the reference: P stays below 256, its rounding is relative
_WGMMA = plgpu.Layout.WGMMA
_PER_ROW, _PER_COLUMN = _WGMMA.reduce(1), _WGMMA.reduce(0)


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

    def probabilities(s, o, l, m, new_m):
        """P in bf16, and output and row sums with P's, all to the new reference."""
        a = jnp.exp2(m - new_m)
        p = jnp.exp2(s - spread(new_m, ROWS))
        l = l * a + hw.quad_sums(p)
        o = rescale(o, m, new_m, a)
        return p.astype(jnp.bfloat16), o, l

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
                p_own, o, l = probabilities(s, o, l, m, m0)

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
                p_own, o, l = probabilities(s, o, l, m, m1)

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
