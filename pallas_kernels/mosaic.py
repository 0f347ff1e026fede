"""Hopper primitives that Pallas has no words for.

A kernel takes one of two objects, `Hopper()` or `mosaic_interpreted.Interpreted()`, and is otherwise the same code on
the GPU and on CPU. A stand-in does what a primitive does as one step of a sequential program: same barriers and data.

The primitives are calls of one warpgroup (128 threads). Three ideas recur:

* Tokens. A warpgroup handles 128 row numbers at a time, one register a thread: an array of shape (128,), the `tokens`.
  They form two tiles of 64 rows. Warp w holds rows 16 w .. 16 w + 15 of tile 0 (lanes 0-15) and of tile 1 (the others),
  the rows that this same warp copies: row numbers travel by shuffle (`rows_to_copy`), not through shared memory.
* Barriers. `copy_rows` is cp.async, whose completion only a raw mbarrier can track, and Pallas' Barrier refs cannot
  enter inline code: an array of barriers here is `barrier_words(n)` words of shared memory (of the stand-in: scratch
  `barrier_scratch(n)`), opened once by `open_barriers`. One warpgroup completes a phase, by `copy_rows` or `arrive`.
* Heads. Row arrays of q and out are flat, [s_q * h_q, ...]; a block of 64 heads starts at row query * h_q + head and
  has min(64, h_q - head) rows: the rest is zero-filled when read and not written.

600 lines, because it is a list: one primitive after another, none of which knows of the others.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

ROWS = 64
"""Rows of a tile: the M of one wgmma."""
CHUNK = 64
"""bf16 values in the 128 bytes that are swizzled as one unit."""
THREADS = 384
"""Threads of a block: three warpgroups."""
TILED = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(128))
"""How a tile lies in shared memory: groups of 8 rows, in a group chunk after chunk, 128-byte swizzle."""


def ref_type(transforms=(), *, read: bool = False, write: bool = False) -> plgpu.RefType:
    """The type of a reference that inline code reads, writes or both; Pallas keeps inputs from being written to.

    jax 0.11.2 does not ask which, later versions do.
    """
    asks = "write" in plgpu.RefType.__dataclass_fields__
    return plgpu.RefType(transforms, **dict(read=read, write=write) if asks else {})


READ, WRITE, UPDATE = ref_type(read=True), ref_type(write=True), ref_type(read=True, write=True)
_WRITE_TILE = ref_type(TILED, write=True)
_SCALAR = plgpu.Layout.WG_SPLAT
_TOKENS = plgpu.Layout.WG_STRIDED((128,), vec_size=1)  # one register a thread
_FOUR = plgpu.Layout.WG_STRIDED((512,), vec_size=1)  # four
_WGMMA = plgpu.Layout.WGMMA
_PER_ROW = _WGMMA.reduce(1)

utils = mgpu.utils


def _types():
    return ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)


def _c(x: int):
    return utils.c(x, ir.IntegerType.get_signless(32))


def _scalar(array) -> ir.Value:
    return array.registers.item()


def _global(ref) -> ir.Value:
    return llvm.addrspacecast(llvm.PointerType.get(address_space=1), utils.memref_ptr(ref))


def _at_byte(pointer, row, row_bytes: int, offset=0) -> ir.Value:
    """Address of byte `offset` of a row, in 64 bits."""
    i8, _, i64 = _types()
    there = utils.getelementptr(pointer, [arith.muli(arith.extsi(i64, row), utils.c(row_bytes, i64))], i8)
    return there if isinstance(offset, int) and offset == 0 else utils.getelementptr(there, [offset], i8)


def _thread() -> ir.Value:
    return arith.andi(utils.thread_idx(), _c(127))


def _splat(value) -> Any:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def _array(layout, values) -> Any:
    """An array of 32-bit numbers from this thread's registers."""
    vector = ir.VectorType.get((1,), values[0].type)
    registers = np.array([llvm.insertelement(llvm.mlir_undef(vector), x, _c(0)) for x in values], dtype=object)
    if layout is _PER_ROW:
        registers = registers.reshape(layout.to_mgpu().registers_shape((ROWS,)))
    signed = True if isinstance(values[0].type, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _token(tokens) -> ir.Value:
    return llvm.extractelement(tokens.registers.flat[0], _c(0))


def _lane_row(thread) -> ir.Value:
    """The row, within its tile, of the token that a thread holds: 16 * warp + lane % 16."""
    return arith.addi(arith.muli(arith.shrui(thread, _c(5)), _c(16)), arith.andi(thread, _c(15)))


def _lane_tile(thread) -> ir.Value:
    return arith.andi(arith.shrui(thread, _c(4)), _c(1))


def _load_tokens(index_row, first, limit) -> Any:
    """Tokens of columns first .. first + 127 of the index row at an address; -1, and not read, from `limit` on."""
    _, i32, _ = _types()
    thread = _thread()
    column = arith.addi(arith.addi(_scalar(first), arith.muli(_lane_tile(thread), _c(ROWS))), _lane_row(thread))
    inside = arith.extui(i32, _less(column, _scalar(limit)))
    # Nothing may depend on the loaded value in here: the warp would wait for it before its next copies.
    token = utils.inline_ptx(
        "{ .reg .pred inside; setp.ne.s32 inside, $2, 0; mov.b32 $0, -1; @inside ld.volatile.global.b32 $0, [$1]; }",
        utils.getelementptr(index_row, [column], i32), inside, result_types=i32, has_side_effects=True,
    )  # fmt: skip
    return _array(_TOKENS, [token])


def _quad_row(thread) -> ir.Value:
    """First of the two rows (the other: 8 further) that a thread holds in wgmma's layouts: 16 * warp + lane / 4."""
    return arith.addi(arith.muli(arith.shrui(thread, _c(5)), _c(16)), arith.shrui(arith.andi(thread, _c(31)), _c(2)))


def _evict_first() -> ir.Value:
    return utils.inline_ptx(
        "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", result_types=_types()[2], has_side_effects=True
    )


def _barrier(ref, k: int) -> ir.Value:
    return utils.getelementptr(utils.memref_ptr(ref), [2 * k], _types()[1])


def _less(a, b) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _below(a, b) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def _equal(a, b) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _transpose_quad(registers, lane):
    """4 x 4 transpose over a quad of lanes: afterwards lane i holds what register i of lanes 0..3 held."""
    values = list(registers)
    for distance in (1, 2):
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, _c(distance)), _c(0))
        for i in range(4):
            j = i | distance
            if i == j:
                continue
            got = utils.shfl_bfly(arith.select(upper, values[i], values[j]), distance)
            values[i], values[j] = arith.select(upper, got, values[i]), arith.select(upper, values[j], got)
    return values


class Hopper:
    """The primitives as sm_90a instructions."""

    # ------------------------------------------------------------------------------------------ matrix products
    wgmma = staticmethod(plgpu.wgmma)
    wgmma_wait = staticmethod(plgpu.wgmma_wait)

    @staticmethod
    def transpose(ref):
        """A [rows, columns] tile as the right-hand side [columns, rows] of a product."""
        return ref.transpose((1, 0))

    @staticmethod
    def accumulate(body: Callable, *init):
        """Runs `body` on accumulators that start as `init` and returns their values once all its wgmma are done."""
        return pl.run_state(body)(tuple(plgpu.ACC.init(x) for x in init))

    @staticmethod
    def fence():
        """Orders this thread's shared-memory stores before the wgmma that read them after the next barrier.

        `plgpu.commit_smem` is this and a warpgroup barrier, which the arrival on a barrier makes redundant.
        """

        @plgpu.inline_mgpu()
        def fence(ctx):
            utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

        fence()

    @staticmethod
    def hidden_zero(ref):
        """An int32 0 that no compiler can fold: the top bits of a global address."""

        @plgpu.inline_mgpu(arg_types=(READ,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))
        def zero(ctx, ref):
            _, i32, i64 = _types()
            bits = arith.shrui(llvm.ptrtoint(i64, utils.memref_ptr(ref)), utils.c(60, i64))
            return _splat(
                utils.inline_ptx("mov.b32 $0, $1;", arith.trunci(i32, bits), result_types=i32, has_side_effects=True)
            )

        return zero(ref)

    # ------------------------------------------------------------------------------------------------- barriers
    @staticmethod
    def barrier_words(n: int) -> int:
        """4-byte words of shared memory that n barriers need, at a multiple of 8 bytes."""
        return 2 * n

    @staticmethod
    def barrier_scratch(n: int):
        """Scratch that they need of their own: none."""
        return None

    @staticmethod
    def open_barriers(barriers, n: int, landing: int):
        """Initialises n barriers, the first `landing` of them for `copy_rows`; all threads of the block meet here."""

        @plgpu.inline_mgpu(arg_types=(WRITE,))
        def init(ctx, barriers):
            first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), _c(0))
            for k in range(n):
                count = 128 if k < landing else 4
                utils.inline_ptx(
                    f"mbarrier.init.shared::cta.b64 [$0], {count};", _barrier(barriers, k), predicate=first,
                    has_side_effects=True,
                )  # fmt: skip
            utils.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
            utils.inline_ptx("bar.sync 0;", has_side_effects=True)

        init(barriers)

    @staticmethod
    def arrive(barriers, k: int):
        """Completes the phase of barrier k (one not for `copy_rows`) once all four warps have come here.

        One arrival a warp: Pallas' own barriers take 128.
        """

        @plgpu.inline_mgpu(arg_types=(UPDATE,))
        def arrive(ctx, barriers):
            utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(utils.thread_idx(), _c(31)), _c(0))
            utils.inline_ptx(
                "mbarrier.arrive.shared::cta.b64 _, [$0];", _barrier(barriers, k), predicate=first,
                has_side_effects=True,
            )  # fmt: skip

        arrive(barriers)

    @staticmethod
    def wait(barriers, k: int, parity):
        """Waits for the phase of barrier k with this parity: the first one has parity 0."""

        @plgpu.inline_mgpu(arg_types=(READ, _SCALAR))
        def wait(ctx, barriers, parity):
            nvvm.mbarrier_try_wait_parity(_barrier(barriers, k), _scalar(parity), _c(10_000_000))

        wait(barriers, parity)

    @staticmethod
    def quad_sums(values):
        """Row sums of what each thread holds: `sum_quads` of them, or of sums of them, are the row sums.

        The four lanes that share a row are added once at the end instead of in every round.
        """

        @plgpu.inline_mgpu(
            arg_types=(_WGMMA,), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_PER_ROW)
        )
        def add(ctx, values):
            sums = []
            for half in values.registers.reshape(-1, 2).T:
                terms = [llvm.extractelement(register, _c(i)) for register in half for i in range(2)]
                while len(terms) > 1:
                    terms = [arith.addf(a, b) for a, b in zip(terms[::2], terms[1::2])]
                sums += terms
            return _array(_PER_ROW, sums)

        return add(values)

    @staticmethod
    def sum_quads(partial):
        """Row sums from those of `quad_sums`."""

        @plgpu.inline_mgpu(
            arg_types=(_PER_ROW,), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_PER_ROW)
        )
        def add(ctx, partial):
            sums = []
            for register in partial.registers.flat:
                value = llvm.extractelement(register, _c(0))
                for distance in (1, 2):
                    value = arith.addf(value, utils.shfl_bfly(value, distance))
                sums.append(value)
            return _array(_PER_ROW, sums)

        return add(partial)

    @staticmethod
    def any_differs(a, b):
        """Whether a row of this warp (not warpgroup) has a != b, as int32; a, b in wgmma's per-row layout."""

        @plgpu.inline_mgpu(
            arg_types=(_PER_ROW, _PER_ROW), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
        )
        def vote(ctx, a, b):
            _, i32, _ = _types()
            differs = None
            for x, y in zip(a.registers.flat, b.registers.flat):
                here = arith.cmpf(arith.CmpFPredicate.UNE, llvm.extractelement(x, _c(0)), llvm.extractelement(y, _c(0)))
                differs = here if differs is None else arith.ori(differs, here)
            return _splat(
                utils.inline_ptx(
                    "{ .reg .pred p; setp.ne.s32 p, $1, 0;"
                    " vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }",
                    arith.extui(i32, differs), result_types=i32, has_side_effects=True,
                )
            )  # fmt: skip

        return vote(a, b)

    # -------------------------------------------------------------------------------------------- global memory
    @staticmethod
    def load_scalar(ref, i):
        """ref[i] of a 1-D int32 array in global memory; issued here, waited for at the first use."""

        @plgpu.inline_mgpu(arg_types=(READ, _SCALAR), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR))
        def load(ctx, ref, i):
            _, i32, _ = _types()
            address = _at_byte(_global(ref), _scalar(i), 4)
            # volatile: ptxas otherwise moves the load down to its first use, where its latency shows
            return _splat(
                utils.inline_ptx("ld.volatile.global.b32 $0, [$1];", address, result_types=i32, has_side_effects=True)
            )

        return load(ref, i)

    @staticmethod
    def share(scratch_ref, lengths_refs, most, extra: int, part, parts: int):
        """Rows (first, end) of part `part` of `parts`: neighbours whose work is about 1 / parts of all rows' work.

        The work of a row is its rounds of 128 tokens, at least one, plus `extra`. All threads of the block come here:
        each sums a strip of rows, the sums are scanned, and whose strip holds a bound walks it again to find the row.

        Args:
          scratch_ref: [>= THREADS / 32 + 2] f32 or int32 shared memory, free before and after.
          lengths_refs: for each scope [n] int32 tokens per row in global memory, or None for `most`; one is not None.
          most: for each scope the bound to which its lengths are clamped.
        """
        scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)
        given = [(ref, bound) for ref, bound in zip(lengths_refs, most) if ref is not None]
        rounds_of_others = sum(-(-bound // (2 * ROWS)) for ref, bound in zip(lengths_refs, most) if ref is None)

        @plgpu.inline_mgpu(arg_types=(UPDATE, _SCALAR, *[READ] * len(given)), return_type=(scalar, scalar))
        def share(ctx, scratch, part, *lengths):
            _, i32, i64 = _types()
            (n,) = ir.MemRefType(lengths[0].type).shape
            thread, warps, strip = utils.thread_idx(), THREADS // 32, -(-n // THREADS)
            start = arith.minui(arith.muli(thread, _c(strip)), _c(n))
            count = arith.minui(_c(strip), arith.subi(_c(n), start))
            first_lengths = [utils.getelementptr(_global(ref), [start], i32) for ref in lengths]

            def word(i):
                return utils.getelementptr(utils.memref_ptr(scratch), [i], i32)

            def read(i):
                return llvm.load(i32, word(i), volatile_=True)

            def write(i, value):
                llvm.store(value, word(i), volatile_=True)

            def meet():
                utils.inline_ptx("bar.sync 0;", has_side_effects=True)

            def work(i):
                rounds = _c(rounds_of_others)
                for first, (_, bound) in zip(first_lengths, given):
                    tokens = llvm.load(i32, utils.getelementptr(first, [i], i32))
                    tokens = arith.minsi(arith.maxsi(tokens, _c(0)), _c(bound))
                    rounds = arith.addi(rounds, arith.shrui(arith.addi(tokens, _c(2 * ROWS - 1)), _c(7)))
                return arith.addi(arith.maxui(rounds, _c(1)), _c(extra))

            (own,) = utils.fori(count, [_c(0)])(lambda i, total: [arith.addi(total[0], work(i))]).results
            upto = own  # this warp's threads up to this one
            for distance in (1, 2, 4, 8, 16):
                upto = utils.inline_ptx(
                    f"{{ .reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff;"
                    " @!p mov.b32 t, 0; add.s32 $0, $1, t; }",
                    upto, result_types=i32, has_side_effects=True,
                )  # fmt: skip
            warp = arith.shrui(thread, _c(5))
            bounds_at = [warps, warps + 1]
            with utils.when(_equal(arith.andi(thread, _c(31)), _c(31))):
                write(warp, upto)
            with utils.when(_equal(thread, _c(0))):
                for at in bounds_at:
                    write(at, _c(0))
            meet()
            total = _c(0)
            for w in range(warps):
                before = read(w)
                upto = arith.addi(upto, arith.select(_below(_c(w), warp), before, _c(0)))
                total = arith.addi(total, before)

            def scaled(x, factor):
                return arith.muli(arith.extui(i64, x), arith.extui(i64, factor))

            for k, at in enumerate(bounds_at):
                bound = scaled(total, arith.addi(_scalar(part), _c(k)))
                start_of_strip = arith.subi(upto, own)
                starts_below = _below(scaled(start_of_strip, _c(parts)), bound)
                ends_below = _below(scaled(upto, _c(parts)), bound)
                with utils.when(_below(arith.extui(i32, ends_below), arith.extui(i32, starts_below))):

                    def walk(i, carry, bound=bound):
                        before, rows = carry
                        inside = arith.extui(i32, _below(scaled(before, _c(parts)), bound))
                        return [arith.addi(before, work(i)), arith.addi(rows, inside)]

                    _, rows = utils.fori(count, [start_of_strip, start])(walk).results
                    write(at, rows)
            meet()
            first, end = (_splat(read(at)) for at in bounds_at)
            meet()
            return first, end

        return share(scratch_ref, part, *[ref for ref, _ in given])

    @staticmethod
    def load_tokens(indices_ref, row, first, limit):
        """Tokens indices_ref[row, first : first + 128]; -1 from column `limit` on, which is not read.

        The load is issued here and waited for at the first use of the tokens.
        """

        @plgpu.inline_mgpu(
            arg_types=(READ, _SCALAR, _SCALAR, _SCALAR),
            return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_TOKENS),
        )
        def load(ctx, indices, row, first, limit):
            width = ir.MemRefType(indices.type).shape[1]
            return _load_tokens(_at_byte(_global(indices), _scalar(row), 4 * width), first, limit)

        return load(indices_ref, row, first, limit)

    @staticmethod
    def consecutive_tokens(first, limit):
        """Tokens first, first + 1, ... of tile 0; -1 from row `limit` on."""

        @plgpu.inline_mgpu(
            arg_types=(_SCALAR, _SCALAR), return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_TOKENS)
        )
        def count(ctx, first, limit):
            row = _lane_row(_thread())
            return _array(_TOKENS, [arith.select(_less(row, _scalar(limit)), arith.addi(_scalar(first), row), _c(-1))])

        return count(first, limit)

    @staticmethod
    def rows_to_copy(tokens, tile: int):
        """The row numbers of a tile as `copy_rows` wants them: four a thread. Early: shuffles take their time."""

        @plgpu.inline_mgpu(arg_types=(_TOKENS,), return_type=plgpu.ShapeDtypeStruct((512,), jnp.int32, layout=_FOUR))
        def spread(ctx, tokens):
            _, i32, _ = _types()
            quarter = arith.shrui(arith.andi(_thread(), _c(31)), _c(3))
            return _array(_FOUR, [
                utils.inline_ptx(
                    "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", _token(tokens),
                    arith.addi(quarter, _c(16 * tile + 4 * j)), result_types=i32, has_side_effects=True,
                )
                for j in range(4)
            ])  # fmt: skip

        return spread(tokens)

    @staticmethod
    def copy_rows(rows_ref, row_numbers, first_chunk: int, buffer, barriers, k: int, *, keep: bool):
        """cp.async of 64 rows into a tile of shared memory; barrier k completes once they are there.

        8 threads a row, 16 bytes each, into the swizzle that wgmma reads. A number outside rows_ref reads nothing and
        zero-fills its row.

        Args:
          rows_ref: [n, d] bf16 in global memory.
          row_numbers: of `rows_to_copy`.
          first_chunk: first 64-column chunk to copy; as many as `buffer` has.
          buffer: [64, 64 * chunks] bf16 tile, `TILED`.
          barriers, k: a barrier opened for this.
          keep: False: evict first from L2, for rows that are read once.
        """

        @plgpu.inline_mgpu(arg_types=(READ, _WRITE_TILE, UPDATE, _FOUR))
        def copy(ctx, rows, buffer, barriers, row_numbers):
            i8, i32, _ = _types()
            n, d = ir.MemRefType(rows.type).shape
            tile_type = ir.MemRefType(buffer.type)
            _, chunks, _, _ = tile_type.shape
            group_bytes, chunk_bytes = (2 * s for s in tile_type.get_strides_and_offset()[0][:2])
            thread = _thread()
            warp, lane = arith.shrui(thread, _c(5)), arith.andi(thread, _c(31))
            part, quarter = arith.andi(lane, _c(7)), arith.shrui(lane, _c(3))
            # Step j copies rows 16 warp + quarter + 4 j: both 8-row groups of the warp, row in group `sub`.
            to = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(buffer)), arith.muli(warp, _c(2 * group_bytes)))
            to = arith.ori(to, arith.addi(arith.muli(quarter, _c(128)), arith.muli(arith.xori(part, quarter), _c(16))))
            # Opaque to LLVM, which would otherwise keep every destination address in a register of its own.
            to = utils.inline_ptx("mov.b32 $0, $1;", to, result_types=i32, has_side_effects=True)
            source = utils.getelementptr(
                _global(rows), [arith.addi(arith.muli(part, _c(16)), _c(128 * first_chunk))], i8
            )
            hint, operand = ("", ()) if keep else (".L2::cache_hint", (_evict_first(),))
            for j, register in enumerate(row_numbers.registers.flat):
                token = llvm.extractelement(register, _c(0))
                inside = arith.cmpi(arith.CmpIPredicate.ult, token, _c(n))  # unsigned: negative ones fail, too
                size = arith.select(inside, _c(16), _c(0))
                row = _at_byte(source, arith.select(inside, token, _c(0)), 2 * d)
                # rows 4 further in their group: the swizzle flips bit 2 of the 16-byte column
                there = llvm.inttoptr(llvm.PointerType.get(address_space=3), arith.xori(to, _c(64 * (j % 2))))
                for chunk in range(chunks):
                    utils.inline_ptx(
                        f"cp.async.cg.shared.global{hint}.L2::256B [$0], [$1], 16, $2{', $3' if operand else ''};",
                        utils.getelementptr(there, [j // 2 * group_bytes + j % 2 * 512 + chunk * chunk_bytes], i8),
                        utils.getelementptr(row, [128 * chunk], i8),
                        size, *operand, has_side_effects=True,
                    )  # fmt: skip
            utils.inline_ptx(
                "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", _barrier(barriers, k), has_side_effects=True
            )

        copy(rows_ref, buffer, barriers, row_numbers)

    @staticmethod
    def write_mask(mask_ref, tokens, n: int):
        """mask_ref[64 tile + row] = 0 where the token is in 0..n-1, else -inf."""

        @plgpu.inline_mgpu(arg_types=(WRITE, _TOKENS))
        def write(ctx, mask, tokens):
            f32 = ir.F32Type.get()
            thread = _thread()
            at = arith.addi(arith.muli(_lane_tile(thread), _c(ROWS)), _lane_row(thread))
            inside = arith.cmpi(arith.CmpIPredicate.ult, _token(tokens), _c(n))
            value = arith.select(inside, utils.c(0.0, f32), utils.c(float("-inf"), f32))
            llvm.store(value, utils.getelementptr(utils.memref_ptr(mask), [at], f32))

        write(mask_ref, tokens)

    @staticmethod
    def load_heads(heads_ref, head, h_q: int):
        """heads_ref[head : head + 64] of an [h_q] float32 array, in wgmma's per-row layout; anything past its end."""

        @plgpu.inline_mgpu(
            arg_types=(READ, _SCALAR), return_type=plgpu.ShapeDtypeStruct((ROWS,), jnp.float32, layout=_PER_ROW)
        )
        def load(ctx, heads, head):
            f32 = ir.F32Type.get()
            row = arith.addi(_scalar(head), _quad_row(_thread()))
            registers = []
            for half in range(2):
                i = arith.minui(arith.addi(row, _c(8 * half)), _c(h_q - 1))
                registers.append(llvm.load(f32, utils.getelementptr(_global(heads), [i], f32)))
            return _array(_PER_ROW, registers)

        return load(heads_ref, head)

    @staticmethod
    def store_heads(values, out_ref, query, head, h_q: int):
        """out_ref[query * h_q + head + i] = values[i] for the heads that exist; values in wgmma's per-row layout."""

        @plgpu.inline_mgpu(arg_types=(WRITE, _PER_ROW, _SCALAR, _SCALAR))
        def store(ctx, out, values, query, head):
            f32 = ir.F32Type.get()
            thread, head = _thread(), _scalar(head)
            row = _quad_row(thread)
            at = _at_byte(_global(out), arith.addi(arith.muli(_scalar(query), _c(h_q)), arith.addi(head, row)), 4)
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(thread, _c(3)), _c(0))
            for half, value in enumerate(values.registers.flat):
                exists = _less(arith.addi(arith.addi(head, row), _c(8 * half)), _c(h_q))
                value = utils.bitcast(llvm.extractelement(value, _c(0)), _types()[1])
                utils.inline_ptx(
                    "st.global.b32 [$0], $1;", utils.getelementptr(at, [8 * half], f32), value,
                    predicate=arith.andi(first, exists), has_side_effects=True,
                )  # fmt: skip

        store(out_ref, values, query, head)

    @staticmethod
    def store_rows(values, out_ref, query, head, h_q: int, column: int):
        """out_ref[query * h_q + head + i, column : column + 256] = values[i] for the heads that exist.

        Straight from wgmma's register layout: a quad of lanes exchanges its values so that each lane stores 16 bytes
        and the quad 64 in a row. No shared memory is needed, so the KV buffers are free for the next query meanwhile.
        The output is evicted first from L2: KV rows stay.
        """

        @plgpu.inline_mgpu(arg_types=(WRITE, _WGMMA, _SCALAR, _SCALAR))
        def store(ctx, out, values, query, head):
            i8, i32, _ = _types()
            row_bytes = 2 * ir.MemRefType(out.type).shape[1]
            thread, head = _thread(), _scalar(head)
            lane = arith.andi(thread, _c(31))
            row = arith.addi(head, _quad_row(thread))
            at = _at_byte(_global(out), arith.addi(arith.muli(_scalar(query), _c(h_q)), row), row_bytes)
            at = utils.getelementptr(at, [arith.addi(arith.muli(arith.andi(lane, _c(3)), _c(16)), _c(2 * column))], i8)
            policy = _evict_first()
            registers = values.registers.reshape(-1, 2)
            for half in range(2):
                exists = None if h_q % ROWS == 0 else _less(arith.addi(row, _c(8 * half)), _c(h_q))
                for first in range(0, len(registers), 4):
                    packed = [utils.bitcast(x, i32) for x in registers[first : first + 4, half]]
                    utils.inline_ptx(
                        "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;",
                        utils.getelementptr(at, [8 * half * row_bytes + 16 * first], i8),
                        *_transpose_quad(packed, lane), policy, predicate=exists, has_side_effects=True,
                    )  # fmt: skip

        store(out_ref, values, query, head)
