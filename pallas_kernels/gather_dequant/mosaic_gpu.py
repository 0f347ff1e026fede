"""Hopper kernel of gather_dequant and gather_workspace (Pallas, Mosaic GPU).

Blocks of one warpgroup walk over tiles of 16 output rows. A row is cut into chunks of eight values, 16 bytes of output:
each thread owns 8 or 9 chunks of a tile, requests all their bytes (eight FP8 values and their scale, or eight plain
ones) before it needs the first, multiplies in float32, rounds once and stores. Nothing passes through shared memory and
no thread waits for another. A workspace is the same walk over the tiles of two pools, in one launch.

Where no count is traced, every tile has a block of its own. Where one is, the kernel reads it and no block visits a
tile past it; but blocks without a live tile cost time, too (0.6 ns each), so the grid must be small. Then the first
blocks, as many as run at once, take equal numbers of tiles, and the rest is left to short blocks of one tile, which the
GPU starts wherever room comes free. Measured on an H200, 262,144 V4 rows in random pages, back to back: all tiles in
equal shares 119.5 us, a sixth of them left to short blocks 116.9 us, a block per tile 114.8 us; without a live row 1.5,
3.1 and 10.8 us.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it in the middle of a trace
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import cdiv
from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.kv_rows import dequantize_rows
from pallas_kernels.mosaic import READ, WRITE

KERNEL_NAME = "gather_dequant"
TILE_ROWS = 16
CHUNK = 8  # values: 16 bytes of output, 8 bytes of FP8
THREADS = 128
LONG_BLOCKS = 132 * 7  # run at once: the SMs of an H200 or H100, times the blocks whose registers fit into one
SHORT_BLOCKS = 132 * 20  # a sixth of the tiles at 262,144 rows; more cost more where few rows are live


class _Pool(NamedTuple):
    """What the kernel knows of one pool when it is compiled."""

    layout: KVLayout
    page_size: int
    num_pages: int
    stride: int  # bytes per page
    num_rows: int  # slots, capacity
    first_row: int  # of the output


def unsupported(*layouts: KVLayout) -> str | None:
    """Why the kernel cannot serve pools of these layouts, or None. Any shape is served, empty ones without a launch."""
    for layout in layouts:
        if layout.dtype != jnp.bfloat16:
            return f"rows of layout {layout!r} are {layout.dtype.name}, the kernel writes bfloat16 rows."
    return None


@functools.partial(jax.jit, static_argnames=("layout", "page_size", "interpret"))
def gather_dequant(
    pages: jax.Array,
    slots: jax.Array,
    *,
    layout: KVLayout,
    page_size: int,
    num_slots: jax.Array | int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Gathers `slots` out of one pool: see `pallas_kernels.gather_dequant`."""
    return _gather([(pages, slots, layout, page_size, num_slots)], interpret)


@functools.partial(
    jax.jit,
    static_argnames=("compressed_layout", "compressed_page_size", "swa_layout", "swa_page_size", "interpret"),
)
def gather_workspace(
    compressed_pages: jax.Array | None,
    compressed_slots: jax.Array | None,
    swa_pages: jax.Array,
    swa_slots: jax.Array,
    *,
    compressed_layout: KVLayout | None,
    compressed_page_size: int | None,
    swa_layout: KVLayout,
    swa_page_size: int,
    num_compressed: jax.Array | int | None = None,
    num_swa: jax.Array | int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Gathers two pools into one buffer with one launch: see `pallas_kernels.gather_workspace`."""
    compressed = compressed_pages, compressed_slots, compressed_layout, compressed_page_size, num_compressed
    swa = swa_pages, swa_slots, swa_layout, swa_page_size, num_swa
    return _gather([swa] if compressed_pages is None else [compressed, swa], interpret)


def _gather(sources: Sequence[tuple], interpret: Any) -> jax.Array:
    """One launch over all sources `(pages, slots, layout, page_size, live)`, one after another in the output."""
    d = sources[0][2].d
    num_rows = sum(slots.shape[0] for _, slots, *_ in sources)
    pools, operands, live_counts = [], [], []
    first_row = 0
    for pages, slots, layout, page_size, live in sources:
        # A source without rows or without pages adds nothing to read: its rows, if any, come from no slot at all.
        if slots.shape[0] and pages.size == 0:
            pages = jnp.zeros((1, layout.page_stride(page_size)), jnp.uint8)
            slots = jnp.full_like(slots, -1)
        if slots.shape[0]:
            num_pages, stride = pages.shape
            pools.append(_Pool(layout, page_size, num_pages, stride, slots.shape[0], first_row))
            operands += [pages, slots]
            live_counts.append(live)
        first_row += slots.shape[0]
    if not pools:
        return jnp.zeros((num_rows, d), jnp.bfloat16)
    traced = [i for i, live in enumerate(live_counts) if live is not None]
    operands += [jnp.asarray(live_counts[i], jnp.int32).reshape(1) for i in traced]

    tiles = sum(cdiv(pool.num_rows, TILE_ROWS) for pool in pools)
    long_blocks, short_blocks = LONG_BLOCKS, SHORT_BLOCKS if traced else tiles
    if interpret:  # few, so that blocks walk over several tiles in small tests, too
        long_blocks, short_blocks = 2, 2
    copy_tile = _copy_tile_interpreted if interpret else _copy_tile

    def divide_up(x, n):
        return lax.div(x + (n - 1), jnp.int32(n))

    def kernel(*refs):
        *refs, out_ref = refs
        live_refs = dict(zip(traced, refs[2 * len(pools) :]))
        live_rows = [
            jnp.clip(live_refs[i][0], 0, pool.num_rows) if i in live_refs else jnp.int32(pool.num_rows)
            for i, pool in enumerate(pools)
        ]
        live_tiles = [divide_up(live, TILE_ROWS) for live in live_rows]

        block = lax.axis_index("block")
        rounds = divide_up(jnp.maximum(sum(live_tiles) - short_blocks, 1), long_blocks)
        shared = rounds * long_blocks  # tiles of the long blocks
        is_long = block < long_blocks
        tile = jnp.where(is_long, block, shared - long_blocks + block)  # the next one of this block
        stop = jnp.where(is_long, shared, tile + 1)
        for i, pool in enumerate(pools):
            pages_ref, slots_ref = refs[2 * i : 2 * i + 2]
            mine = divide_up(jnp.maximum(jnp.minimum(stop, live_tiles[i]) - tile, 0), long_blocks)

            def visit(step, carry, tile=tile, live=live_rows[i], pool=pool, pages_ref=pages_ref, slots_ref=slots_ref):
                copy_tile(pool, pages_ref, slots_ref, out_ref, (tile + step * long_blocks) * TILE_ROWS, live)
                return carry

            lax.fori_loop(0, mine, visit, None)
            # From here on, tiles count from the first one of the next pool.
            tile, stop = tile + mine * long_blocks - live_tiles[i], stop - live_tiles[i]

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, d), jnp.bfloat16),
        grid=(min(tiles, long_blocks + short_blocks),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name=KERNEL_NAME,
    )(*operands)


# A chunk is requested if its predicate holds, else it is 0. The results leave through registers of their own: an output
# operand may share its register with an input.
_LOAD_FP8 = """{{
.reg .pred p;
.reg .b32 v0, v1, s;
setp.ne.s32 p, $3, 0;
mov.b32 v0, 0; mov.b32 v1, 0; mov.b32 s, 0;
@p ld.global.nc.L1::no_allocate.v2.b32 {{v0, v1}}, [$4];
@p ld.global.nc.{scale_type} s, [$5];
mov.b32 $0, v0; mov.b32 $1, v1; mov.b32 $2, s;
}}"""

_LOAD_PLAIN = """{
.reg .pred p;
.reg .b32 v0, v1, v2, v3;
setp.ne.s32 p, $4, 0;
mov.b32 v0, 0; mov.b32 v1, 0; mov.b32 v2, 0; mov.b32 v3, 0;
@p ld.global.nc.L1::no_allocate.v4.b32 {v0, v1, v2, v3}, [$5];
mov.b32 $0, v0; mov.b32 $1, v1; mov.b32 $2, v2; mov.b32 $3, v3;
}"""

# e4m3 is exact in f16, f16 in f32; the product is rounded once, to bf16.
_DEQUANTIZE_4 = """{
.reg .b16 low, high;
.reg .b16 h0, h1, h2, h3;
.reg .b32 p, q;
.reg .f32 f0, f1, f2, f3;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 p, low;
cvt.rn.f16x2.e4m3x2 q, high;
mov.b32 {h0, h1}, p;
mov.b32 {h2, h3}, q;
cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
mul.rn.f32 f0, f0, $3; mul.rn.f32 f1, f1, $3; mul.rn.f32 f2, f2, $3; mul.rn.f32 f3, f3, $3;
cvt.rn.bf16x2.f32 p, f1, f0;
cvt.rn.bf16x2.f32 q, f3, f2;
mov.b32 $0, p;
mov.b32 $1, q;
}"""


def _copy_tile(pool: _Pool, pages_ref, slots_ref, out_ref, row: jax.Array, live: jax.Array) -> None:
    """Copies rows `row` .. `row + 15` of a pool, as far as they are below `live`, to the output."""
    layout = pool.layout
    row_chunks, fp8_chunks = layout.d // CHUNK, layout.d_fp8 // CHUNK
    plain_chunks = row_chunks - fp8_chunks
    num_slots = min(pool.num_pages * pool.page_size, 2**31)

    @plgpu.inline_mgpu(arg_types=(READ, READ, WRITE) + (plgpu.Layout.WG_SPLAT,) * 2)
    def copy(_, pages, slots, out, row, live):
        utils = mgpu.utils
        i8, i32, i64 = (ir.IntegerType.get_signless(n) for n in (8, 32, 64))
        f32 = ir.F32Type.get()
        equal, signed_below, below = (getattr(arith.CmpIPredicate, name) for name in ("eq", "slt", "ult"))

        def c(value, like=i32):
            return utils.c(value, like)

        def wide(x, factor=1):
            return arith.muli(arith.extui(i64, x), c(factor, i64))

        def pointer(ref, offset, element=i8):
            base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))
            return utils.getelementptr(base, [offset], element)

        row, live = row.registers.item(), live.registers.item()
        # Opaque, so that what follows from it is computed anew for each tile and takes no registers between tiles.
        thread = utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32, has_side_effects=True)
        thread = arith.remui(thread, c(THREADS))

        # This thread's chunks, numbered through the rows: first those of the FP8 columns, then of the plain ones.
        chunks = []
        last = plain_chunks % 64  # 72 plain columns go as 64 and 8: dividing by a power of two is cheap
        sections = (0, fp8_chunks), (fp8_chunks, plain_chunks - last), (row_chunks - last, last)
        for first, columns in sections:
            for step in range(TILE_ROWS * columns // THREADS):
                number = arith.addi(thread, c(step * THREADS))
                column = arith.addi(arith.remui(number, c(columns)), c(first))
                to_row = arith.addi(row, arith.divui(number, c(columns)))
                is_live = arith.cmpi(signed_below, to_row, live)
                slot = utils.inline_ptx(
                    "{ .reg .pred p; .reg .b32 s; setp.ne.s32 p, $2, 0; mov.b32 s, -1;"
                    " @p ld.global.nc.b32 s, [$1]; mov.b32 $0, s; }",
                    pointer(slots, wide(to_row), i32), arith.extui(i32, is_live), result_types=i32,
                )  # fmt: skip
                chunks.append((slot, to_row, column, is_live, first < fp8_chunks))

        loaded = []
        for slot, to_row, column, is_live, is_fp8 in chunks:
            is_inside = arith.cmpi(below, slot, c(num_slots if num_slots < 2**31 else -(2**31)))
            is_inside = arith.extui(i32, is_inside)
            page, token = arith.divui(slot, c(pool.page_size)), arith.remui(slot, c(pool.page_size))
            page_start = wide(page, pool.stride)
            data = arith.addi(page_start, wide(token, layout.data_bytes))
            if is_fp8:
                data = arith.addi(data, wide(column, CHUNK))
                tile = arith.divui(column, c(layout.tile // CHUNK))
                scale = arith.addi(wide(token, layout.scale_stride), wide(tile, layout.scale_bits // 8))
                scale = arith.addi(arith.addi(page_start, scale), c(layout.scale_offset(pool.page_size), i64))
                words = utils.inline_ptx(
                    _LOAD_FP8.format(scale_type="b32" if layout.scale_bits == 32 else "u8"),
                    is_inside, pointer(pages, data), pointer(pages, scale), result_types=[i32] * 3,
                )  # fmt: skip
            else:
                in_token = arith.addi(wide(column, 2 * CHUNK), c(layout.plain_offset - 2 * layout.d_fp8, i64))
                data = arith.addi(data, in_token)
                words = utils.inline_ptx(_LOAD_PLAIN, is_inside, pointer(pages, data), result_types=[i32] * 4)
            loaded.append((words, to_row, column, is_live, is_fp8))

        for words, to_row, column, is_live, is_fp8 in loaded:
            if is_fp8:
                *quads, scale = words
                if layout.scale_bits == 8:
                    is_nan, is_lowest = (arith.cmpi(equal, scale, c(byte)) for byte in (0xFF, 0))
                    bits = arith.select(is_nan, c(0x7FC00000), arith.shli(scale, c(23)))
                    scale = arith.select(is_lowest, c(1 << 22), bits)  # 2^-127 is subnormal; PTX multiplies it exactly
                scale = arith.bitcast(f32, scale)
                words = [w for q in quads for w in utils.inline_ptx(_DEQUANTIZE_4, q, scale, result_types=[i32] * 2)]
            to = arith.addi(wide(to_row, 2 * layout.d), wide(column, 2 * CHUNK))
            to = arith.addi(to, c(pool.first_row * 2 * layout.d, i64))
            utils.inline_ptx(
                "st.global.v4.b32 [$0], {$1, $2, $3, $4};", pointer(out, to), *words,
                predicate=is_live, has_side_effects=True,
            )  # fmt: skip

    copy(pages_ref, slots_ref, out_ref, row, live)


def _copy_tile_interpreted(pool: _Pool, pages_ref, slots_ref, out_ref, row: jax.Array, live: jax.Array) -> None:
    """Stand-in of `_copy_tile` in plain Pallas."""
    layout = pool.layout

    def copy_row(i, carry):
        @pl.when(row + i < live)
        def _():
            slot = slots_ref[row + i]
            inside = (slot >= 0) & (slot < pool.num_pages * pool.page_size)
            page, token = jnp.divmod(jnp.where(inside, slot, 0), pool.page_size)
            record = pages_ref[page, pl.ds(token * layout.data_bytes, layout.data_bytes)]
            if layout.scales_behind_page:
                scales = layout.scale_offset(pool.page_size) + token * layout.scale_stride
                record = jnp.concatenate([record, pages_ref[page, pl.ds(scales, layout.scale_stride)]])
            values = dequantize_rows(record, layout=layout)
            out_ref[pool.first_row + row + i, :] = jnp.where(inside, values, jnp.bfloat16(0))

        return carry

    lax.fori_loop(0, TILE_ROWS, copy_row, None)
