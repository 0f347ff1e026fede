"""Plain-Pallas stand-ins of `mosaic_paged.HopperPaged` for the GPU interpreter on CPU, under the same names."""
# ruff: noqa: D102  (the docstrings are those of mosaic_paged.HopperPaged)

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kv_rows import dequantize_rows
from pallas_kernels.mosaic import ROWS
from pallas_kernels.mosaic_interpreted import Interpreted

_LEFT = 256  # columns of the left half of a tile
_DATA, _SCALES = 576, 8  # bytes of a V4 row


def _columns(rows, right: bool):
    return rows[:, _LEFT:] if right else rows[:, :_LEFT]


class InterpretedPaged(Interpreted):
    """See `mosaic_paged.HopperPaged`. Units are bytes from the start of the pool; the ring holds one half tile."""

    @staticmethod
    def stage_scratch():
        return plgpu.SMEM((ROWS * _DATA,), jnp.uint8)

    @staticmethod
    def load_slots(indices_refs, extra, row, first, limit):
        slots = [Interpreted.load_tokens(ref, row, first, limit) for ref in indices_refs]
        return jnp.where(extra != 0, slots[-1], slots[0])

    @staticmethod
    def locate(slots, extra, pools):
        def units(pool):
            page, token = lax.div(slots, pool.page_size), lax.rem(slots, pool.page_size)
            inside = (slots >= 0) & (slots < pool.slots)
            return jnp.where(inside, page * pool.stride + token * pool.layout.data_bytes, -1)

        return jnp.where(extra != 0, units(pools[-1]), units(pools[0]))

    @staticmethod
    def load_scales(pages_refs, slots, extra, pools):
        def scales(ref, pool):
            page, token = lax.div(slots, pool.page_size), lax.rem(slots, pool.page_size)
            inside = (slots >= 0) & (slots < pool.slots)
            start = page * pool.stride + pool.layout.scale_offset(pool.page_size) + token * pool.layout.scale_stride
            at = jnp.where(inside, start, 0)[:, None] + lax.iota(jnp.int32, _SCALES)
            return jnp.where(inside[:, None], ref[...].reshape(-1)[at], 0)

        both = [scales(ref, pool) for ref, pool in zip(pages_refs, pools)]
        return jnp.where(extra != 0, both[-1], both[0])

    @staticmethod
    def request(stage, halves, pages_refs, units, extra, layout):
        InterpretedPaged._fill(stage, halves[0][0], pages_refs, units, extra)

    @staticmethod
    def _fill(stage, tile, pages_refs, units, extra):
        units = units[tile * ROWS : (tile + 1) * ROWS, None]
        at = jnp.maximum(units, 0) + lax.iota(jnp.int32, _DATA)
        both = [jnp.where(units >= 0, ref[...].reshape(-1)[at], 0) for ref in pages_refs]
        stage[...] = jnp.where(extra != 0, both[-1], both[0]).reshape(-1)

    @staticmethod
    def convert(stage, turn, halves, j, pages_refs, now, then, layout, scales, buffer, barriers, k):
        tile, right = halves[j]
        scales = scales[tile * ROWS : (tile + 1) * ROWS]
        records = jnp.concatenate([stage[...].reshape(ROWS, _DATA), scales], axis=1)
        buffer[...] = _columns(dequantize_rows(records, layout=layout), right)
        plgpu.barrier_arrive(barriers.at[k])
        InterpretedPaged._fill(stage, halves[(j + 1) % 4][0], pages_refs, *(then if j == 3 else now))

    @staticmethod
    def fetch(pages_ref, pool, slots, tile, right, buffer, barriers, k):
        layout, slots = pool.layout, slots[tile * ROWS : (tile + 1) * ROWS]
        page, token = lax.div(slots, pool.page_size), lax.rem(slots, pool.page_size)
        inside = (slots >= 0) & (slots < pool.slots)

        def read(offset, stride, size):
            at = jnp.where(inside, page * pool.stride + offset + token * stride, 0)
            return pages_ref[...].reshape(-1)[at[:, None] + lax.iota(jnp.int32, size)]

        records = read(0, layout.data_bytes, layout.data_bytes)
        if layout.scales_behind_page:
            scales = read(layout.scale_offset(pool.page_size), layout.scale_stride, layout.scale_stride)
            records = jnp.concatenate([records, scales], axis=1)
        rows = jnp.where(inside[:, None], dequantize_rows(records, layout=layout), 0)
        buffer[...] = _columns(rows, right)
        plgpu.barrier_arrive(barriers.at[k])
