"""Hopper primitives for rows that lie as bytes in a paged pool: see `pallas_kernels/mosaic.py`.

Two ways lead from a pool into the bf16 tiles that wgmma reads, for a half tile (columns 0..255, or the rest) at a time:

* `fetch`: any layout, straight through registers (plain rows: straight by cp.async). Its latency shows.
* `request` and `convert`: V4 rows through a ring in shared memory. A thread asks, by cp.async, for 16 bytes of a row
  at a time, and converts them itself some time later: the ring holds the next 8 pieces of every thread, so nobody but
  the thread waits for anybody. `convert` works through the pieces of one half tile and asks for those 8 further on.

Both cut a half tile alike. Warp w writes rows 16 w .. 16 w + 15, in two groups of 8. Four lanes share a row: of 64 FP8
bytes, a column chunk, each takes 16 and writes 2 x 16 bytes; of 128 plain bytes each takes 16, twice. With that the
eight lanes of a store that go together, two rows, meet all banks of shared memory once.

500 lines: these primitives and that cut, which nothing else uses.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.mosaic import (
    _SCALAR,
    _TOKENS,
    _WGMMA,
    _WRITE_TILE,
    CHUNK,
    READ,
    ROWS,
    UPDATE,
    WRITE,
    Hopper,
    _array,
    _at_byte,
    _barrier,
    _c,
    _global,
    _less,
    _load_tokens,
    _quad_row,
    _scalar,
    _thread,
    _token,
    _types,
)
from pallas_kernels.mosaic_fp8 import dequantize, dequantize_even, is_odd

PIECES = 8
"""Pieces of 16 bytes that a thread has in the ring."""
UNIT = 16
"""Bytes in which addresses within a pool are counted: 32 bits of them reach 64 GiB."""
LEFT_CHUNKS = 4
"""Column chunks of the left half of a tile."""

_TWO = plgpu.Layout.WG_STRIDED((256,), vec_size=1)
_RING_BYTES = PIECES * 16 * 128

utils = mgpu.utils


class Pool(NamedTuple):
    """What a kernel knows of a pool when it is compiled."""

    layout: KVLayout
    page_size: int
    num_pages: int
    stride: int  # bytes per page

    @property
    def slots(self) -> int:
        """Slots of the pool that an index can name."""
        return min(self.num_pages * self.page_size, 2**31 - 1)


class _Piece(NamedTuple):
    """What one thread copies at once: 16 of the bytes of a row."""

    group: int  # of 8 rows
    chunk: int  # 64 columns, counted in the half tile
    source: int  # first byte of the chunk in the row's data
    scale: int | None  # number of the chunk's scale, if it is FP8
    step: int  # which half of a chunk of plain values


def _pieces(layout: KVLayout, right: bool) -> list[_Piece]:
    pieces = []
    first, stop = (LEFT_CHUNKS, layout.d // CHUNK) if right else (0, LEFT_CHUNKS)
    for group in range(2):
        for chunk in range(first, stop):
            column = chunk * CHUNK
            if column < layout.d_fp8:
                pieces.append(_Piece(group, chunk - first, column, column // layout.tile, 0))
            else:
                source = layout.plain_offset + 2 * (column - layout.d_fp8)
                pieces += [_Piece(group, chunk - first, source, None, step) for step in range(2)]
    return pieces


def _mul_wide(x, factor: int) -> ir.Value:
    _, _, i64 = _types()
    return arith.muli(arith.extui(i64, x), utils.c(factor, i64))


def _opaque(x) -> ir.Value:
    """x, of which LLVM knows nothing: what follows from it is computed where it is used and takes no registers."""
    return utils.inline_ptx("mov.b32 $0, $1;", x, result_types=_types()[1], has_side_effects=True)


def _shared_address(ref) -> ir.Value:
    return llvm.ptrtoint(_types()[1], utils.memref_ptr(ref))


def _inside(slot, pool: Pool) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ult, slot, _c(pool.slots))  # unsigned: negative ones fail, too


def _page_and_token(slot, pool: Pool) -> tuple[ir.Value, ir.Value]:
    return arith.divui(slot, _c(pool.page_size)), arith.remui(slot, _c(pool.page_size))


def _scale_byte(slot, pool: Pool) -> ir.Value:
    """Byte of the pool at which the scales of a slot start; layouts with scales behind the page."""
    page, token = _page_and_token(slot, pool)
    behind = arith.addi(arith.muli(token, _c(pool.layout.scale_stride)), _c(pool.layout.scale_offset(pool.page_size)))
    return arith.addi(_mul_wide(page, pool.stride), arith.extui(_types()[2], behind))


def _choose(extra, values) -> ir.Value:
    """values[extra]; of one or two."""
    if len(values) == 1:
        return values[0]
    return arith.select(arith.cmpi(arith.CmpIPredicate.ne, extra, _c(0)), values[1], values[0])


class _Lane(NamedTuple):
    """Where a thread stands in the cut of a half tile."""

    warp: Any
    sub: Any  # row in the group of 8
    quarter: Any  # which of the four lanes of a row
    flip: Any  # 64 in odd rows: there, plain columns come in the other order

    @classmethod
    def here(cls):
        thread = _opaque(_thread())
        lane = arith.andi(thread, _c(31))
        sub = arith.shrui(lane, _c(2))
        return cls(arith.shrui(thread, _c(5)), sub, arith.andi(lane, _c(3)), arith.muli(arith.andi(sub, _c(1)), _c(64)))

    def of_row(self, value, tile: int, group: int) -> ir.Value:
        """What the lane that holds the token of one of this thread's two rows has as `value`."""
        holder = arith.addi(self.sub, _c(16 * tile + 8 * group))
        return utils.inline_ptx(
            "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", value, holder, result_types=_types()[1],
            has_side_effects=True,
        )  # fmt: skip


class _Target:
    """The addresses of a half tile to which a thread writes."""

    def __init__(self, buffer, lane: _Lane):
        tile_type = ir.MemRefType(buffer.type)
        self.group_bytes, self.chunk_bytes = (2 * s for s in tile_type.get_strides_and_offset()[0][:2])
        start = arith.addi(_shared_address(buffer), arith.muli(lane.warp, _c(2 * self.group_bytes)))
        start = arith.addi(start, arith.muli(lane.sub, _c(128)))

        def column(number):
            return _opaque(arith.ori(start, arith.muli(arith.xori(number, lane.sub), _c(16))))

        self.fp8 = column(arith.muli(lane.quarter, _c(2)))
        self.plain = column(arith.ori(lane.quarter, arith.shrui(lane.flip, _c(4))))

    def address(self, piece: _Piece, second: bool = False) -> ir.Value:
        """Of the first, or second, 16 bytes that a piece becomes."""
        start = self.plain if piece.scale is None else self.fp8
        flip = 64 * piece.step if piece.scale is None else 16 * second
        start = arith.xori(start, _c(flip)) if flip else start
        return arith.addi(start, _c(piece.group * self.group_bytes + piece.chunk * self.chunk_bytes))

    def store(self, piece: _Piece, words, offset=None) -> None:
        for i in range(0, len(words), 4):
            at = self.address(piece, i > 0)
            utils.inline_ptx(
                "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", at if offset is None else arith.addi(at, offset),
                *words[i : i + 4], has_side_effects=True,
            )  # fmt: skip


def _source_in_chunk(piece: _Piece, lane: _Lane) -> ir.Value:
    """Byte of the row's data at which a piece starts."""
    start = arith.addi(arith.muli(lane.quarter, _c(16)), _c(piece.source))
    if piece.scale is not None:
        return start
    return arith.addi(start, arith.xori(lane.flip, _c(64)) if piece.step else lane.flip)


def _land(barriers, k: int) -> None:
    """This thread's part in completing landing barrier k after plain stores that wgmma is to see."""
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
    utils.inline_ptx("bar.warp.sync 0xffffffff;", has_side_effects=True)
    first = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(utils.thread_idx(), _c(31)), _c(0))
    utils.inline_ptx(
        "mbarrier.arrive.shared::cta.b64 _, [$0], 32;", _barrier(barriers, k), predicate=first, has_side_effects=True
    )


def _fp8_pieces(layout: KVLayout, right: bool) -> list[_Piece]:
    return [piece for piece in _pieces(layout, right) if piece.scale is not None]


def _load_piece(source, size) -> list[ir.Value]:
    """The four words at a global address, or zeros if size is 0."""
    words = utils.inline_ptx(
        "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.s32 p, $5, 0;"
        " mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0;"
        " @p ld.global.nc.v4.b32 {a, b, c, d}, [$4];"
        " mov.b32 $0, a; mov.b32 $1, b; mov.b32 $2, c; mov.b32 $3, d; }",
        source, size, result_types=[_types()[1]] * 4, has_side_effects=True,
    )  # fmt: skip
    return list(words)


class _Rows:
    """The bytes of a tile's rows, for a thread: addresses come to be when they are needed, for they take registers."""

    def __init__(self, units, tile: int, pages, lane: _Lane):
        self.units, self.tile, self.pages, self.lane, self.rows = units, tile, pages, lane, {}

    def source(self, piece: _Piece) -> tuple[ir.Value, ir.Value]:
        """Address and size of a piece."""
        row, size = self.of_group(piece.group)
        return utils.getelementptr(row, [_source_in_chunk(piece, self.lane)], _types()[0]), size

    def of_group(self, group: int) -> tuple[ir.Value, ir.Value]:
        """Address of the row in this group; 16, or 0 if there is none."""
        i8, _, i64 = _types()
        if group not in self.rows:
            unit = self.lane.of_row(self.units, self.tile, group)
            known = arith.cmpi(arith.CmpIPredicate.ne, unit, _c(-1))
            at = arith.shli(arith.extui(i64, arith.select(known, unit, _c(0))), utils.c(4, i64))
            self.rows[group] = utils.getelementptr(self.pages, [at], i8), arith.select(known, _c(16), _c(0))
        return self.rows[group]


def _copy_piece(to, source, size) -> None:
    utils.inline_ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", to, source, size, has_side_effects=True)


def _ring(stage, turn):
    """A function from piece numbers, counted within a turn, to the address of the thread's slot.

    A turn has 28 pieces, so every other one starts in the middle of the ring.
    """
    start = arith.addi(_shared_address(stage), arith.muli(_opaque(_thread()), _c(16)))
    ahead = arith.muli(turn, _c(_RING_BYTES // 2))
    halves = _opaque(arith.addi(start, ahead)), _opaque(arith.subi(arith.addi(start, _c(_RING_BYTES // 2)), ahead))

    def slot(i):
        half, place = divmod(i % PIECES, PIECES // 2)
        return arith.addi(halves[half], _c(place * 16 * 128))

    return slot


class HopperPaged(Hopper):
    """`Hopper` and the primitives of paged pools."""

    @staticmethod
    def stage_scratch():
        """Scratch for the ring."""
        return plgpu.SMEM((_RING_BYTES,), jnp.uint8)

    @staticmethod
    def load_slots(indices_refs, extra, row, first, limit):
        """`load_tokens` from the first, or with `extra` from the second of the index arrays."""

        @plgpu.inline_mgpu(
            arg_types=(_SCALAR,) * 4 + (READ,) * len(indices_refs),
            return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_TOKENS),
        )
        def load(ctx, extra, row, first, limit, *indices):
            rows = [_at_byte(_global(x), _scalar(row), 4 * ir.MemRefType(x.type).shape[1]) for x in indices]
            return _load_tokens(_choose(_scalar(extra), rows), first, limit)

        return load(extra, row, first, limit, *indices_refs)

    @staticmethod
    def locate(slots, extra, pools):
        """Where the data of slots start in their pool (the second one with `extra`), in `UNIT`s; -1 outside it."""

        @plgpu.inline_mgpu(
            arg_types=(_TOKENS, _SCALAR), return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=_TOKENS)
        )
        def locate(ctx, slots, extra):
            slot, units = _token(slots), []
            for pool in pools:
                page, token = _page_and_token(slot, pool)
                unit = arith.addi(
                    arith.muli(page, _c(pool.stride // UNIT)), arith.muli(token, _c(pool.layout.data_bytes // UNIT))
                )
                units.append(arith.select(_inside(slot, pool), unit, _c(-1)))
            return _array(_TOKENS, [_choose(_scalar(extra), units)])

        return locate(slots, extra)

    @staticmethod
    def load_scales(pages_refs, slots, extra, pools):
        """The 8 scale bytes of 128 V4 slots, two words a thread; issued here, waited for at the first use."""

        @plgpu.inline_mgpu(
            arg_types=(_TOKENS, _SCALAR) + (READ,) * len(pools),
            return_type=plgpu.ShapeDtypeStruct((256,), jnp.int32, layout=_TWO),
        )
        def load(ctx, slots, extra, *pages):
            i8, i32, _ = _types()
            slot, sources, known = _token(slots), [], []
            for ref, pool in zip(pages, pools):
                inside = _inside(slot, pool)
                at = _scale_byte(arith.select(inside, slot, _c(0)), pool)
                sources.append(utils.getelementptr(_global(ref), [at], i8))
                known.append(arith.extui(i32, inside))
            source, inside = _choose(_scalar(extra), sources), _choose(_scalar(extra), known)
            words = utils.inline_ptx(
                "{ .reg .pred inside; setp.ne.s32 inside, $3, 0; @!inside mov.b32 $0, 0; @!inside mov.b32 $1, 0;"
                " @inside ld.volatile.global.v2.b32 {$0, $1}, [$2]; }",
                source, inside, result_types=[i32] * 2, has_side_effects=True,
            )  # fmt: skip
            return _array(_TWO, list(words))

        return load(slots, extra, *pages_refs)

    @staticmethod
    def request(stage, halves, pages_refs, units, extra, layout: KVLayout):
        """Asks for the first half tile of a block: a left one.

        Args:
          halves: the half tiles of a round in their order: (tile, right).
          units, extra: of the round, see `locate`.
        """

        @plgpu.inline_mgpu(arg_types=(WRITE, _TOKENS, _SCALAR) + (READ,) * len(pages_refs))
        def request(ctx, stage, units, extra, *pages):
            (tile, right), *_ = halves
            lane = _Lane.here()
            rows = _Rows(_token(units), tile, _choose(_scalar(extra), [_global(ref) for ref in pages]), lane)
            ring = _ring(stage, _c(0))
            for i, piece in enumerate(_fp8_pieces(layout, right)):
                _copy_piece(ring(i), *rows.source(piece))
                utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

        request(stage, units, extra, *pages_refs)

    @staticmethod
    def convert(stage, turn, halves, j: int, pages_refs, now, then, layout: KVLayout, scales, buffer, barriers, k: int):
        """Dequantises half tile j of a round into a tile, completes barrier k, and asks for what comes 8 pieces on.

        Plain values need no conversion and go straight into the tile, by cp.async.

        Args:
          turn: 0 or 1, changing from round to round.
          halves: the half tiles of a round in their order: (tile, right).
          now, then: (units, extra) of this round and, for the last of its half tiles, of the next one.
          scales: of `load_scales`.
          buffer: [64, columns] bf16 tile, `TILED`.
        """
        (units, extra), (next_units, next_extra), (tile, right) = now, then, halves[j]
        pieces = _fp8_pieces(layout, right)
        plain = [piece for piece in _pieces(layout, right) if piece.scale is None]
        # All pieces of the round and of the half tile after it: number of the half tile, piece.
        stream = [(n, piece) for n, (_, r) in enumerate([*halves, halves[0]]) for piece in _fp8_pieces(layout, r)]
        first = sum(len(_fp8_pieces(layout, r)) for _, r in halves[:j])

        @plgpu.inline_mgpu(
            arg_types=(UPDATE, _WRITE_TILE, UPDATE, _SCALAR)
            + (_TOKENS, _SCALAR) * 2
            + (_TWO,)
            + (READ,) * len(pages_refs)
        )
        def convert(ctx, stage, buffer, barriers, turn, units, extra, next_units, next_extra, scales, *pages):
            _, i32, _ = _types()
            lane = _Lane.here()
            ring, target = _ring(stage, _scalar(turn)), _Target(buffer, lane)
            pools = [_global(ref) for ref in pages]
            row_scales = llvm.extractelement(scales.registers.flat[int(right)], _c(0))

            def rows_of(n):
                of_next = n == len(halves)
                u, e, t = (next_units, next_extra, halves[0][0]) if of_next else (units, extra, halves[n][0])
                return _Rows(_token(u), t, _choose(_scalar(e), pools), lane)

            rows = {}

            def ask(i):
                n, piece = stream[i]
                rows[n] = rows.get(n) or rows_of(n)
                _copy_piece(ring(i), *rows[n].source(piece))
                utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

            def scale(word, chunk):
                return arith.andi(arith.shrui(word, arith.muli(chunk, _c(8))), _c(255))

            def read(i, pending):
                utils.inline_ptx(f"cp.async.wait_group {pending};", has_side_effects=True)
                return utils.inline_ptx(
                    "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", ring(first + i), result_types=[i32] * 4,
                    has_side_effects=True,
                )  # fmt: skip

            if plain:
                here = rows_of(j)
                for piece in plain:
                    _copy_piece(target.address(piece), *here.source(piece))
                # Adds an arrival to those that the barrier waits for, and arrives when these copies have.
                utils.inline_ptx(
                    "cp.async.mbarrier.arrive.shared::cta.b64 [$0];", _barrier(barriers, k), has_side_effects=True
                )
            words = read(0, PIECES - 1)
            words_of_scales = [lane.of_row(row_scales, tile, group) for group in range(2)]
            # The last of a row's 8 scale bytes is not used.
            odd = is_odd([], words_of_scales, 0x00808080 if right else 0x80808080 - 2**32)
            for i, piece in enumerate(pieces):
                upcoming = read(i + 1, PIECES - 2) if i + 1 < len(pieces) else None
                odd = arith.ori(odd, is_odd(words, [], 0))
                target.store(piece, dequantize_even(words, scale(words_of_scales[piece.group], _c(piece.chunk))))
                ask(first + i + PIECES)
                words = upcoming
            odd = utils.inline_ptx(
                "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }",
                odd, result_types=i32, has_side_effects=True,
            )  # fmt: skip
            with utils.when(arith.cmpi(arith.CmpIPredicate.ne, odd, _c(0))):
                # All from the start: what was prepared above would have had to stay in registers. A loop: it is rare,
                # and what lies in the way of the others should be short.
                again = rows_of(j)
                for group in range(2):
                    head, word = again.source(pieces[0]._replace(group=group)), lane.of_row(row_scales, tile, group)

                    @utils.fori(_c(len(pieces) // 2), [])
                    def _(chunk, _carry, head=head, word=word, group=group):
                        source = utils.getelementptr(head[0], [arith.muli(chunk, _c(CHUNK))], _types()[0])
                        words = dequantize(_load_piece(source, head[1]), scale(word, chunk), 8)
                        target.store(pieces[0]._replace(group=group), words, arith.muli(chunk, _c(target.chunk_bytes)))
                        return []

            _land(barriers, k)

        convert(stage, buffer, barriers, turn, units, extra, next_units, next_extra, scales, *pages_refs)

    @staticmethod
    def fetch(pages_ref, pool: Pool, slots, tile: int, right: bool, buffer, barriers, k: int):
        """Copies or dequantises a half tile of one pool, of any layout with bf16 rows, and completes barrier k."""
        layout = pool.layout
        pieces = _pieces(layout, right)

        @plgpu.inline_mgpu(arg_types=(READ, _TOKENS, _WRITE_TILE, UPDATE))
        def fetch(ctx, pages, slots, buffer, barriers):
            i8, i32, _ = _types()
            lane = _Lane.here()
            target, pages = _Target(buffer, lane), _global(pages)
            for group in range(2):
                slot = lane.of_row(_token(slots), tile, group)
                inside = _inside(slot, pool)
                slot = arith.select(inside, slot, _c(0))
                page, token = _page_and_token(slot, pool)
                at = arith.addi(_mul_wide(page, pool.stride), _mul_wide(token, layout.data_bytes))
                row = utils.getelementptr(pages, [at], i8)
                scales = row
                if layout.scales_behind_page:
                    scales = utils.getelementptr(pages, [_scale_byte(slot, pool)], i8)
                elif layout.d_fp8:
                    scales = utils.getelementptr(row, [layout.d_fp8], i8)
                size = arith.select(inside, _c(16), _c(0))
                loaded = []
                for piece in (p for p in pieces if p.group == group):
                    source = utils.getelementptr(row, [_source_in_chunk(piece, lane)], i8)
                    if not layout.d_fp8:
                        to = target.address(piece)
                        utils.inline_ptx(
                            "cp.async.cg.shared.global.L2::256B [$0], [$1], 16, $2;", to, source, size,
                            has_side_effects=True,
                        )  # fmt: skip
                        continue
                    words = _load_piece(source, size)
                    scale = None
                    if piece.scale is not None:
                        kind = "u8" if layout.scale_bits == 8 else "b32"
                        scale = utils.inline_ptx(
                            f"{{ .reg .pred p; .reg .b32 a; setp.ne.s32 p, $2, 0; mov.b32 a, 0;"
                            f" @p ld.global.nc.{kind} a, [$1]; mov.b32 $0, a; }}",
                            utils.getelementptr(scales, [piece.scale * layout.scale_bits // 8], i8), size,
                            result_types=i32, has_side_effects=True,
                        )  # fmt: skip
                    loaded.append((piece, words, scale))
                for piece, words, scale in loaded:
                    if scale is not None:
                        words = dequantize(words, scale, layout.scale_bits)
                    target.store(piece, words)
            if layout.d_fp8:
                _land(barriers, k)
            else:
                utils.inline_ptx(
                    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", _barrier(barriers, k),
                    has_side_effects=True,
                )  # fmt: skip

        fetch(pages_ref, slots, buffer, barriers)

    @staticmethod
    def store_rows(values, out_ref, query, head, h_q: int, column: int):
        """`Hopper.store_rows`, or its like for float32: 8 bytes a lane, 32 in a row a quad; they are read soon."""
        if out_ref.dtype != jnp.float32:
            return Hopper.store_rows(values, out_ref, query, head, h_q, column)

        @plgpu.inline_mgpu(arg_types=(WRITE, _WGMMA, _SCALAR, _SCALAR))
        def store(ctx, out, values, query, head):
            i8, i32, _ = _types()
            row_bytes = 4 * ir.MemRefType(out.type).shape[1]
            thread, head = _thread(), _scalar(head)
            row = arith.addi(head, _quad_row(thread))
            at = _at_byte(_global(out), arith.addi(arith.muli(_scalar(query), _c(h_q)), row), row_bytes)
            at = utils.getelementptr(at, [arith.addi(arith.muli(arith.andi(thread, _c(3)), _c(8)), _c(4 * column))], i8)
            for half in range(2):
                exists = None if h_q % ROWS == 0 else _less(arith.addi(row, _c(8 * half)), _c(h_q))
                for i, register in enumerate(values.registers.reshape(-1, 2)[:, half]):
                    words = [utils.bitcast(llvm.extractelement(register, _c(j)), i32) for j in range(2)]
                    there = utils.getelementptr(at, [8 * half * row_bytes + 32 * i], i8)
                    utils.inline_ptx(
                        "st.global.v2.b32 [$0], {$1, $2};", there, *words, predicate=exists, has_side_effects=True
                    )

        return store(out_ref, values, query, head)
