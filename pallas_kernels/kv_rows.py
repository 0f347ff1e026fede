"""Bytes of KV rows: quantise, dequantise, read from and write to the pages of a pool. Plain jnp.

The pivot is a token's *record*, `[bytes_per_token] uint8`: its data bytes, then (V4) the scale bytes that the page
keeps elsewhere. Every layout has the same four steps: `quantize_rows` and `dequantize_rows` between rows and records,
`read_records` and `write_records` between records and pages.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import check_array, check_int
from pallas_kernels.kv_layout import KVLayout, check_layout


def quantize_rows(rows: jax.Array, *, layout: KVLayout) -> jax.Array:
    """Encodes rows as the bytes that a pool of `layout` stores for a token.

    scale = 2^ceil(log2(max(amax / 448, 1e-4))) per tile, value = e4m3fn(x / scale), nearest even. The exponent comes
    from the bits of amax: amax / 448 <= 2^k iff amax <= 1.75 * 2^(k + 8), so no rounded division or log2 is involved.
    A tile with a NaN or infinity gets a NaN scale. Values without a scale are rounded once to `layout.dtype`.

    Args:
      rows: [..., layout.d] bfloat16 or float32.
      layout: the pool's layout.

    Returns:
      [..., layout.bytes_per_token] uint8.

    Raises:
      ValueError: a wrong width or dtype, or no KVLayout.

    Source: the quantiser of FlashMLA `tests/quant.py`.
    """
    check_layout("layout", layout)
    if not hasattr(rows, "dtype") or rows.shape[-1:] != (layout.d,) or rows.dtype not in (jnp.bfloat16, jnp.float32):
        came = f"{rows.dtype} {rows.shape}" if hasattr(rows, "dtype") else type(rows).__name__
        raise ValueError(f"`rows` must be bfloat16 or float32 [..., d={layout.d}] ({layout!r}), got {came}.")
    rows = jnp.asarray(rows)
    lead = rows.shape[:-1]
    fp8, plain = jnp.split(rows, [layout.d_fp8], axis=-1)
    plain_bytes = lax.bitcast_convert_type(plain.astype(layout.dtype), jnp.uint8).reshape(*lead, layout.plain_bytes)
    if not layout.d_fp8:
        return plain_bytes
    tiles = fp8.astype(jnp.float32).reshape(*lead, layout.num_scales, layout.tile)
    bits = lax.bitcast_convert_type(jnp.abs(tiles), jnp.int32).max(-1)  # ordered like the values; NaN is largest
    exponent = jnp.maximum((bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000), -13)
    finite = bits < 0x7F800000
    inverse = lax.bitcast_convert_type((127 - exponent) << 23, jnp.float32)
    values = (jnp.where(finite[..., None], tiles, 0) * inverse[..., None]).astype(jnp.float8_e4m3fn)
    value_bytes = lax.bitcast_convert_type(values, jnp.uint8).reshape(*lead, layout.d_fp8)
    if layout.scale_bits == 8:
        scales = jnp.where(finite, exponent + 127, 255).astype(jnp.uint8)
        pad = jnp.zeros((*lead, layout.scale_stride - layout.num_scales), jnp.uint8)
        return jnp.concatenate([value_bytes, plain_bytes, scales, pad], axis=-1)
    scales = jnp.where(finite, lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32), jnp.nan)
    scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*lead, 4 * layout.num_scales)
    return jnp.concatenate([value_bytes, scale_bytes, plain_bytes], axis=-1)


def dequantize_rows(records: jax.Array, *, layout: KVLayout) -> jax.Array:
    """Decodes records `[..., layout.bytes_per_token] uint8` to rows `[..., layout.d] layout.dtype`.

    A quantised value is f32(e4m3fn) * f32(scale), rounded once to bfloat16 (exact for V4, where the scale is a power
    of two). Products below 2^-126 flush to zero.
    """
    lead = records.shape[:-1]
    plain = records[..., layout.plain_offset : layout.data_bytes]
    plain = plain.reshape(*lead, layout.d - layout.d_fp8, layout.dtype.itemsize)
    plain = lax.bitcast_convert_type(plain, layout.dtype)
    if not layout.d_fp8:
        return plain
    values = lax.bitcast_convert_type(records[..., : layout.d_fp8], jnp.float8_e4m3fn).astype(jnp.float32)
    values = values.reshape(*lead, layout.num_scales, layout.tile)
    if layout.scale_bits == 8:
        byte = records[..., layout.data_bytes : layout.data_bytes + layout.num_scales].astype(jnp.int32)
        # 2^-127 (byte 0) is no normal float32: half the value times 2^-126 is the same product.
        values = jnp.where(byte[..., None] == 0, values * 0.5, values)
        scales = lax.bitcast_convert_type(jnp.maximum(byte, 1) << 23, jnp.float32)
        scales = jnp.where(byte == 255, jnp.nan, scales)
    else:
        scales = records[..., layout.d_fp8 : layout.plain_offset].reshape(*lead, layout.num_scales, 4)
        scales = lax.bitcast_convert_type(scales, jnp.float32)
    values = (values * scales[..., None]).astype(layout.dtype).reshape(*lead, layout.d_fp8)
    return jnp.concatenate([values, plain], axis=-1)


def read_records(
    pages: jax.Array, slots: jax.Array, *, layout: KVLayout, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Reads the records of slots: `(records [..., bytes_per_token] uint8, valid [...] bool)`.

    A slot outside the pool is not valid; what stands in its record is unspecified. Addresses are (page, byte in page)
    pairs, so they do not overflow 32 bits.
    """
    page, token = slots // page_size, slots % page_size
    valid = (slots >= 0) & (page < pages.shape[0])
    if 0 in (*slots.shape, pages.shape[0]):  # also: XLA's CPU compiler crashes on such gathers inside shard_map
        return jnp.zeros((*slots.shape, layout.bytes_per_token), jnp.uint8), valid
    page = jnp.where(valid, page, 0)

    def read(start, size):
        at = jnp.stack([page, start], axis=-1)
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(slots.ndim,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        )
        return lax.gather(pages, at, numbers, (1, size), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    data = read(token * layout.data_bytes, layout.data_bytes)
    if layout.scales_behind_page:
        scales = read(layout.scale_offset(page_size) + token * layout.scale_stride, layout.scale_stride)
        data = jnp.concatenate([data, scales], axis=-1)
    return data, valid


def write_records(
    pages: jax.Array, slots: jax.Array, records: jax.Array, *, layout: KVLayout, page_size: int
) -> jax.Array:
    """Writes records to slots; a slot outside the pool is not written.

    Args:
      pages: [num_pages, stride] uint8.
      slots: [n] int32, distinct where they are inside the pool; what equal ones hold afterwards is undefined.
      records: [n, layout.bytes_per_token] uint8, from `quantize_rows`.
      layout, page_size: of the pool.

    Returns:
      The new pages.

    Raises:
      ValueError: a wrong shape, dtype or page stride.
    """
    check_layout("layout", layout).check_pages("pages", pages, page_size)
    (n,) = check_array("slots", slots, jnp.int32, n=None)
    check_array("records", records, jnp.uint8, n=n, bytes_per_token=layout.bytes_per_token)
    if 0 in (n, pages.shape[0]):
        return pages
    inside = (slots >= 0) & (slots // page_size < pages.shape[0])
    page, token = jnp.where(inside, slots // page_size, pages.shape[0] + lax.iota(jnp.int32, n)), slots % page_size
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )

    def write(pages, start, part):
        at = jnp.stack([page, start], axis=-1)
        # Of indices that may be equal XLA makes an atomic exchange for every byte.
        return lax.scatter(pages, at, part, numbers, unique_indices=True, mode=lax.GatherScatterMode.FILL_OR_DROP)

    pages = write(pages, token * layout.data_bytes, records[:, : layout.data_bytes])
    if layout.scales_behind_page:
        scales = layout.scale_offset(page_size) + token * layout.scale_stride
        pages = write(pages, scales, records[:, layout.data_bytes :])
    return pages


def quantize_pages(rows: jax.Array, *, layout: KVLayout, page_size: int) -> jax.Array:
    """Builds whole pages from rows (for BF16 and F32 layouts: packs them). Slack bytes are 0.

    Args:
      rows: [num_pages, page_size, layout.d] bfloat16 or float32.
      layout: the pool's layout; see `quantize_rows` for the quantiser.
      page_size: tokens per page.

    Returns:
      [num_pages, layout.page_stride(page_size)] uint8.

    Raises:
      ValueError: a wrong shape or dtype.
    """
    check_layout("layout", layout)
    page_size, dtypes = check_int("page_size", page_size), (jnp.bfloat16, jnp.float32)
    num_pages, _, _ = check_array("rows", rows, dtypes, num_pages=None, page_size=page_size, d=layout.d)
    records = quantize_rows(rows, layout=layout)
    parts = [records[..., : layout.data_bytes].reshape(num_pages, page_size * layout.data_bytes)]
    if layout.scales_behind_page:
        parts.append(records[..., layout.data_bytes :].reshape(num_pages, page_size * layout.scale_stride))
    used = page_size * layout.bytes_per_token
    return jnp.pad(jnp.concatenate(parts, axis=-1), ((0, 0), (0, layout.page_stride(page_size) - used)))
