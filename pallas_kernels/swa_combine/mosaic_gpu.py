"""Hopper kernel of combine_swa_indices (Pallas, Mosaic GPU).

A block (one warpgroup) writes a tile of four rows, one row per warp: top-k part, window and -1 tail alike, in one pass
of 16-byte stores, so the output needs no fill. The top-k entries are read whole, whatever a row keeps of them: to wait
for its position first costs 2% (H200, 16,384 rows of 1,024 + 128). The arithmetic is plain jnp on `[4, columns]`
arrays, shared by the GPU and the interpreter; what moves data (`_Hopper`) has stand-ins (`_Interpreted`).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas.fuser  # the interpreter would import it in the middle of a trace
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import cdiv
from pallas_kernels.mosaic import READ, WRITE
from pallas_kernels.swa_combine.reference import combined_width

KERNEL_NAME = "combine_swa_indices"
TILE_ROWS = 4
VECTOR = 4  # int32: 16 bytes
WARP_COLUMNS = 32 * VECTOR
MAX_COLUMNS = 10 * WARP_COLUMNS  # of a tile: 40 registers a thread

# Row i of a tile belongs to warp i, four neighbouring columns to a lane; a value per row is held by all its lanes.
TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((TILE_ROWS, WARP_COLUMNS), (VECTOR,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
ROW = TILE.reduce(1)


@functools.partial(jax.jit, static_argnames=("compress_ratio", "topk", "window", "interpret"))
def combine_swa_indices(
    topk_indices: jax.Array | None,
    query_pos: jax.Array,
    query_req: jax.Array,
    compressed_base: jax.Array,
    swa_base: jax.Array,
    swa_first_pos: jax.Array,
    *,
    compress_ratio: int,
    topk: int,
    window: int,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Combined rows and their lengths: see `pallas_kernels.combine_swa_indices`."""
    rows, num_reqs = query_pos.shape[0], swa_base.shape[0]
    width = combined_width(topk, window)  # whole multiples of WARP_COLUMNS
    reads_topk = topk_indices is not None and topk > 0
    parts = cdiv(width, MAX_COLUMNS)  # a wide row is written by several blocks
    columns = cdiv(width // WARP_COLUMNS, parts) * WARP_COLUMNS
    move = _Interpreted if interpret else _Hopper

    def kernel(*refs):
        topk_ref = refs[0] if reads_topk else None
        pos_ref, req_ref, compressed_base_ref, swa_base_ref, first_pos_ref, indices_ref, lengths_ref = refs[reads_topk:]
        row = lax.axis_index("tile") * TILE_ROWS + plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS,), 0, layout=ROW)
        in_range = row < rows
        at = jnp.where(in_range, row, 0)
        pos, req = move.look_up(pos_ref, at), move.look_up(req_ref, at)
        is_live = in_range & (req >= 0) & (req < num_reqs)
        req = jnp.where(is_live, req, 0)

        seen = jnp.where(is_live, jnp.maximum(pos + 1, 0), 0)
        topk_len = jnp.minimum(lax.div(seen, jnp.int32(compress_ratio)), topk) if topk else jnp.zeros_like(seen)
        length = topk_len + jnp.minimum(seen, window)
        # The window ends at `pos`: its column j holds position j - length + 1 + pos.
        to_swa = move.look_up(swa_base_ref, req) - move.look_up(first_pos_ref, req) + pos + 1 - length

        def spread(x):
            return lax.broadcast_in_dim(x, (TILE_ROWS, columns), [0])

        first = lax.axis_index("part") * columns
        column = first + plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, columns), 1, layout=TILE)
        out = jnp.where(column < spread(length), column + spread(to_swa), -1)
        if topk:
            to_compressed = spread(move.look_up(compressed_base_ref, req))
            entry = move.load_tile(topk_ref, at, first, columns) if reads_topk else column
            out = jnp.where(column < spread(topk_len), jnp.where(entry < 0, -1, entry + to_compressed), out)
        move.store_tile(indices_ref, row, first, out)

        @pl.when(lax.axis_index("part") == 0)
        def _():
            move.store_row(lengths_ref, row, length)

    operands = (query_pos, query_req, compressed_base, swa_base, swa_first_pos)
    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct((rows, width), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)),
        grid=(parts, cdiv(rows, TILE_ROWS)),  # the last axis is CUDA's x, the one without a 65,535 limit
        grid_names=("part", "tile"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name=KERNEL_NAME,
    )(*([topk_indices] if reads_topk else []), *operands)


class _Hopper:
    """Per-thread loads and stores, each masked: a tile may overhang its array."""

    @staticmethod
    def _pointer(ref, row, column, width):
        """Address of element `[row, column]` of an int32 array with rows of `width`."""
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        base = llvm.addrspacecast(llvm.PointerType.get(address_space=1), mgpu.utils.memref_ptr(ref))
        at = arith.muli(arith.extsi(i64, row), mgpu.utils.c(width, i64))
        if column is not None:
            at = arith.addi(at, arith.extsi(i64, column))
        return mgpu.utils.getelementptr(base, [at], i32)

    @staticmethod
    def _lane_columns(first, columns):
        """The first column of each vector of the calling lane."""
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(32, i32))
        start = arith.addi(first, arith.muli(lane, mgpu.utils.c(VECTOR, i32)))
        return [arith.addi(start, mgpu.utils.c(k, i32)) for k in range(0, columns, WARP_COLUMNS)]

    @staticmethod
    def _scalar(row_array):
        """The calling lane's row of a `[4]` array."""
        (register,) = row_array.registers.flat
        return vector.extract(register, dynamic_position=[], static_position=[0])

    @staticmethod
    def look_up(ref, at):
        """`ref[at]` for a `[4]` array of valid positions."""

        @plgpu.inline_mgpu(
            arg_types=(READ, ROW),
            return_type=plgpu.ShapeDtypeStruct((TILE_ROWS,), jnp.int32, layout=ROW),
        )
        def load(_, ref, at):
            i32 = ir.IntegerType.get_signless(32)
            value = mgpu.utils.inline_ptx(
                "ld.global.nc.b32 $0, [$1];", _Hopper._pointer(ref, _Hopper._scalar(at), None, 1), result_types=i32
            )
            registers = np.empty_like(at.registers)
            registers.flat[0] = vector.broadcast(ir.VectorType.get((1,), i32), value)
            return mgpu.FragmentedArray(_registers=registers, _layout=at.layout, _is_signed=True)

        return load(ref, at)

    @staticmethod
    def load_tile(ref, row, first, columns):
        """`ref[row, first : first + columns]`; 0 past the last column, which is not read."""
        width = ref.shape[1]

        @plgpu.inline_mgpu(
            arg_types=(READ, ROW, plgpu.Layout.WG_SPLAT),
            return_type=plgpu.ShapeDtypeStruct((TILE_ROWS, columns), jnp.int32, layout=TILE),
        )
        def load(_, ref, row, first):
            i32 = ir.IntegerType.get_signless(32)
            step = VECTOR if width % VECTOR == 0 else 1  # else only single elements are aligned
            names = [f"v{k}" for k in range(step)]
            ptx = "\n".join([
                "{ .reg .pred p;", f".reg .b32 {', '.join(names)};", f"setp.lt.s32 p, ${step + 1}, {width};",
                *(f"mov.b32 {name}, 0;" for name in names),
                f"@p ld.global.nc.L1::no_allocate{'.v4' if step > 1 else ''}.b32 "
                + ("{" + ", ".join(names) + "}" if step > 1 else names[0]) + f", [${step}];",
                *(f"mov.b32 ${k}, {name};" for k, name in enumerate(names)), "}",
            ])  # fmt: skip
            row, first = _Hopper._scalar(row), first.registers.item()
            layout = TILE.to_mgpu()
            registers = np.empty(layout.registers_shape((TILE_ROWS, columns)), dtype=object)
            for k, column in enumerate(_Hopper._lane_columns(first, columns)):
                values = []
                for part in range(0, VECTOR, step):
                    at = arith.addi(column, mgpu.utils.c(part, i32))
                    pointer = _Hopper._pointer(ref, row, at, width)
                    values += mgpu.utils.inline_ptx(ptx, pointer, at, result_types=[i32] * step)
                registers.flat[k] = vector.from_elements(ir.VectorType.get((VECTOR,), i32), values)
            return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True)

        return load(ref, row, first)

    @staticmethod
    def store_tile(ref, row, first, values):
        """`ref[row, first + j] = values[:, j]` where that element exists."""
        rows, width = ref.shape

        @plgpu.inline_mgpu(arg_types=(WRITE, ROW, plgpu.Layout.WG_SPLAT, TILE))
        def store(_, ref, row, first, values):
            i32 = ir.IntegerType.get_signless(32)
            row, first = _Hopper._scalar(row), first.registers.item()
            in_rows = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.utils.c(rows, i32))
            lane_columns = _Hopper._lane_columns(first, values.shape[1])
            for register, column in zip(values.registers.flat, lane_columns, strict=True):
                inside = arith.cmpi(arith.CmpIPredicate.slt, column, mgpu.utils.c(width, i32))
                elements = [vector.extract(register, dynamic_position=[], static_position=[k]) for k in range(VECTOR)]
                mgpu.utils.inline_ptx(
                    "st.global.v4.b32 [$0], {$1, $2, $3, $4};", _Hopper._pointer(ref, row, column, width), *elements,
                    predicate=arith.andi(in_rows, inside), has_side_effects=True,
                )  # fmt: skip

        store(ref, row, first, values)

    @staticmethod
    def store_row(ref, row, values):
        """`ref[row] = values` where that element exists."""
        (rows,) = ref.shape

        @plgpu.inline_mgpu(arg_types=(WRITE, ROW, ROW))
        def store(_, ref, row, values):
            i32 = ir.IntegerType.get_signless(32)
            row = _Hopper._scalar(row)
            lane = arith.remui(mgpu.utils.thread_idx(), mgpu.utils.c(32, i32))
            is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.utils.c(0, i32))
            in_rows = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.utils.c(rows, i32))
            mgpu.utils.inline_ptx(
                "st.global.b32 [$0], $1;", _Hopper._pointer(ref, row, None, 1), _Hopper._scalar(values),
                predicate=arith.andi(in_rows, is_first), has_side_effects=True,
            )  # fmt: skip

        store(ref, row, values)


class _Interpreted:
    """Stand-ins of `_Hopper` in plain Pallas."""

    @staticmethod
    def look_up(ref, at):
        return jnp.stack([ref[at[i]] for i in range(TILE_ROWS)])

    @staticmethod
    def load_tile(ref, row, first, columns):
        width = ref.shape[1]
        read = jnp.stack([ref[row[i], :] for i in range(TILE_ROWS)])
        column = first + lax.iota(jnp.int32, columns)
        return jnp.where(column < width, read[:, jnp.minimum(column, width - 1)], 0)

    @staticmethod
    def store_tile(ref, row, first, values):
        rows, width = ref.shape
        columns = values.shape[1]

        def store(i, count):
            ref[row[i], pl.ds(first, count)] = values[i, :count]

        for i in range(TILE_ROWS):
            overhangs = first + columns > width
            pl.when((row[i] < rows) & ~overhangs)(functools.partial(store, i, columns))
            if width % columns:
                pl.when((row[i] < rows) & overhangs)(functools.partial(store, i, width % columns))

    @staticmethod
    def store_row(ref, row, values):
        for i in range(TILE_ROWS):

            @pl.when(row[i] < ref.shape[0])
            def _(i=i):
                ref[row[i]] = values[i]
