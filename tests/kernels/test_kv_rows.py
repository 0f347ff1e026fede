"""Layouts and bytes: strides, quantiser, dequantiser, gather, write."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import KVLayout, gather_dequant, gather_workspace, quantize_pages, quantize_rows, write_records
from tests.helpers.oracles import BF16, golden, read_row

LAYOUTS = [KVLayout.V4, KVLayout.V32, KVLayout.BF16, KVLayout.F32]


def bits(x) -> np.ndarray:
    """Bit patterns, so that NaN compares equal to itself."""
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype == BF16 else np.uint32)


@pytest.mark.parametrize(
    "page_size, used, stride, scale_offset",
    [(1, 584, 1152, 576), (2, 1168, 1728, 1152), (64, 37376, 37440, 36864), (256, 149504, 149760, 147456)],
)
def test_v4_page_table(page_size, used, stride, scale_offset):
    layout = KVLayout.V4
    assert page_size * layout.bytes_per_token == used
    assert layout.page_stride(page_size) == stride
    assert layout.scale_offset(page_size) == scale_offset


def test_layout_facts():
    assert [x.d for x in LAYOUTS] == [512, 576, 512, 512]
    assert [x.bytes_per_token for x in LAYOUTS] == [584, 656, 1024, 2048]
    assert [x.dtype for x in LAYOUTS] == [jnp.bfloat16, jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert KVLayout.BF16.with_d(576).bytes_per_token == 1152 and KVLayout.F32.with_d(576).bytes_per_token == 2304
    assert len({hash(x) for x in LAYOUTS}) == 4 and KVLayout.V4.with_d(512) == KVLayout.V4
    for layout, d in [(KVLayout.V4, 576), (KVLayout.V32, 512), (KVLayout.BF16, 640)]:
        with pytest.raises(ValueError, match="`d` of KVLayout"):
            layout.with_d(d)
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVLayout.V4.d = 3


def quantize_oracle(x: np.ndarray, tile: int):
    """scale = 2^ceil(log2(max(amax / 448, 1e-4))), by frexp; value = e4m3(x / scale)."""
    tiles = np.asarray(x, np.float64).reshape(len(x), -1, tile)
    quotient = np.maximum((np.abs(tiles).max(-1) / 448).astype(np.float32), np.float32(1e-4))
    mantissa, exponent = np.frexp(quotient)
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    values = np.ldexp(tiles, -exponent[..., None]).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    return exponent, values.reshape(len(x), -1)


@pytest.mark.parametrize("layout", [KVLayout.V4, KVLayout.V32], ids=repr)
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_quantiser(rng, layout, dtype):
    x = (rng.standard_normal((600, layout.d)) * np.exp2(rng.uniform(-30, 30, (600, 1)))).astype(dtype)
    x[0] = 0
    x[1, : layout.d_fp8] = 448 * 2.0**-3  # on the border: scale 2^-3 exactly
    x[2, : layout.d_fp8] = np.nextafter(np.float32(448 * 2.0**-3), np.float32(100)).astype(dtype)
    x[3, : layout.d_fp8] = 2.0**-140
    records = np.asarray(jax.jit(lambda x: quantize_rows(x, layout=layout))(x))
    exponent, values = quantize_oracle(x[:, : layout.d_fp8], layout.tile)
    np.testing.assert_array_equal(records[:, : layout.d_fp8], values.view(np.uint8))
    if layout == KVLayout.V4:
        np.testing.assert_array_equal(records[:, 576:583], exponent + 127)
        assert (records[0, 576:583] == 114).all() and (records[:, 583] == 0).all()
    else:
        np.testing.assert_array_equal(records[:, 512:528].copy().view(np.float32), np.exp2(exponent))
    plain = records[:, layout.plain_offset : layout.data_bytes].copy().view(BF16)
    np.testing.assert_array_equal(plain, x[:, layout.d_fp8 :].astype(BF16))


def test_quantiser_keeps_nan_in_its_tile():
    x = np.ones((2, 512), np.float32)
    x[0, 70], x[1, 130] = np.nan, np.inf
    pages = quantize_pages(x[None], layout=KVLayout.V4, page_size=2)
    rows = np.asarray(gather_dequant(pages, jnp.arange(2), layout=KVLayout.V4, page_size=2), np.float32)
    for row, tile in ((0, 1), (1, 2)):
        broken = np.zeros(512, bool)
        broken[tile * 64 : tile * 64 + 64] = True
        assert np.isnan(rows[row, broken]).all() and (rows[row, ~broken] == 1).all()


def all_bytes_pages(page_size: int, slots: int, layout=KVLayout.V4) -> np.ndarray:
    """Hard case 7: every fp8 byte, scale bytes 127 + t % 5 and the special ones, slack and pad 0xFF."""
    num_pages = -(-slots // page_size)
    pages = np.full((num_pages, layout.page_stride(page_size)), 0xFF, np.uint8)
    for t in range(slots):
        page, at = pages[t // page_size], t % page_size
        page[at * 576 : at * 576 + 448] = (np.arange(448) + 37 * t) % 256
        page[at * 576 + 448 : at * 576 + 576] = np.arange(64).astype(np.float32).astype(BF16).view(np.uint8) ^ (t % 2)
        scale = [127 + t % 5] * 7 if t % 8 else [20, 114, 254, 255, 10, 127, 0]
        page[layout.scale_offset(page_size) + at * 8 :][:7] = scale
    return pages


@pytest.mark.parametrize("page_size", [1, 2, 64, 256])
def test_every_byte_and_page_size(rng, page_size):
    n = 300
    pages = all_bytes_pages(page_size, n)
    slots = rng.permutation(n).astype(np.int32)
    got = np.asarray(gather_dequant(pages, slots, layout=KVLayout.V4, page_size=page_size))
    want = np.stack([read_row(pages[s // page_size], s % page_size, page_size, "V4") for s in slots]).astype(BF16)
    tiny = np.abs(want.astype(np.float64)) < 2.0**-126  # may flush to zero
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    keep = ~np.isnan(want) & ~tiny
    np.testing.assert_array_equal(bits(got)[keep], bits(want)[keep])
    first = np.asarray(gather_dequant(all_bytes_pages(1, n), slots, layout=KVLayout.V4, page_size=1))
    np.testing.assert_array_equal(bits(got), bits(first))


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_pages_round_trip(rng, layout, page_size):
    """quantize_pages, gather and a byte-by-byte reading agree; write_records to empty pages gives the same bytes."""
    rows = rng.standard_normal((5, page_size, layout.d)).astype(np.float32)
    pages = np.asarray(quantize_pages(rows, layout=layout, page_size=page_size))
    assert pages.shape == (5, layout.page_stride(page_size))
    slots = rng.permutation(5 * page_size).astype(np.int32)
    got = gather_dequant(pages, slots, layout=layout, page_size=page_size)
    assert got.dtype == layout.dtype and got.shape == (5 * page_size, layout.d)
    want = [read_row(pages[s // page_size], s % page_size, page_size, layout.name) for s in slots]
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.stack(want))
    flat = jnp.asarray(rows.reshape(-1, layout.d)[slots])
    written = write_records(
        jnp.zeros_like(pages), slots, quantize_rows(flat, layout=layout), layout=layout, page_size=page_size
    )
    np.testing.assert_array_equal(written, pages)


def test_wider_stride_is_read(rng):
    """FlashMLA's V32 golden pool has page_size 61 and one token of extra stride."""
    z = golden("flashmla/d3_v32_h64.npz")
    pages, page_size = z["k_cache_raw"], int(z["page"])
    slots = np.array([0, 60, 61, 7 * 61 - 1], np.int32)
    got = np.asarray(gather_dequant(pages, slots, layout=KVLayout.V32, page_size=page_size), np.float32)
    np.testing.assert_array_equal(got, [read_row(pages[s // 61], s % 61, 61, "V32") for s in slots])


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_slots_outside_give_zero_rows_and_are_never_written(rng, layout):
    pages = jnp.full((3, layout.page_stride(4)), 0x3C, jnp.uint8)
    slots = jnp.array([-(2**31), -5, -1, 12, 13, 2147480000, 2**31 - 1], jnp.int32)
    assert (gather_dequant(pages, slots, layout=layout, page_size=4) == 0).all()
    records = jnp.zeros((7, layout.bytes_per_token), jnp.uint8)
    np.testing.assert_array_equal(write_records(pages, slots, records, layout=layout, page_size=4), pages)


def test_live_count_is_traced(rng):
    rows = jnp.asarray(rng.standard_normal((4, 16, 512)), jnp.float32)
    pages = quantize_pages(rows, layout=KVLayout.BF16, page_size=16)
    slots = jnp.arange(64)[::-1].astype(jnp.int32)
    gather = jax.jit(lambda n: gather_dequant(pages, slots, layout=KVLayout.BF16, page_size=16, num_slots=n))
    for n in (0, 1, 63, 64, 99):
        n_live = min(n, 64)
        want = rows.reshape(64, 512)[::-1][:n_live].astype(jnp.bfloat16)
        np.testing.assert_array_equal(gather(jnp.int32(n))[:n_live], want)


def test_workspace_is_compressed_then_swa(rng):
    """Two pools of different layouts and page sizes in one buffer; a c0 layer has the SWA part only."""
    c = quantize_pages(rng.standard_normal((3, 2, 512)).astype(np.float32), layout=KVLayout.V4, page_size=2)
    s = quantize_pages(rng.standard_normal((2, 64, 512)).astype(np.float32), layout=KVLayout.BF16, page_size=64)
    c_slots, s_slots = jnp.array([5, -1, 0], jnp.int32), jnp.array([127, 3, 64, 1000], jnp.int32)
    swa = dict(swa_layout=KVLayout.BF16, swa_page_size=64)
    got = gather_workspace(c, c_slots, s, s_slots, compressed_layout=KVLayout.V4, compressed_page_size=2, **swa)
    top = gather_dequant(c, c_slots, layout=KVLayout.V4, page_size=2)
    bottom = gather_dequant(s, s_slots, layout=KVLayout.BF16, page_size=64)
    np.testing.assert_array_equal(got, jnp.concatenate([top, bottom]))
    none = dict(compressed_layout=None, compressed_page_size=None)
    np.testing.assert_array_equal(gather_workspace(None, None, s, s_slots, **none, **swa), bottom)


@pytest.mark.parametrize("n", [0, 1, 65536, 70000])
def test_row_counts(rng, n):
    pages = quantize_pages(rng.standard_normal((2, 8, 512)).astype(np.float32), layout=KVLayout.V4, page_size=8)
    out = gather_dequant(pages, np.arange(n, dtype=np.int32) % 16, layout=KVLayout.V4, page_size=8)
    assert out.shape == (n, 512)
    if n:
        np.testing.assert_array_equal(out[-1], out[(n - 1) % 16])


@pytest.mark.slow
def test_past_2_31_bytes():
    """57,600 pages of 64 tokens are 2.16 GB: rows around page 57,359, where byte offsets pass 2^31, and the last."""
    layout, page_size, num_pages = KVLayout.V4, 64, 57_600
    pages = np.zeros((num_pages, layout.page_stride(page_size)), np.uint8)
    marked = [0, 57_357, 57_358, 57_359, 57_599]
    for k, page in enumerate(marked):
        rows = np.full((1, page_size, 512), k + 1, np.float32) + np.arange(page_size, dtype=np.float32)[:, None] / 16
        pages[page] = np.asarray(quantize_pages(rows, layout=layout, page_size=page_size))[0]
    slots = np.array([p * 64 + t for p in marked for t in (0, 63)], np.int32)
    pages = jnp.asarray(pages)
    got = np.asarray(gather_dequant(pages, slots, layout=layout, page_size=page_size), np.float32)
    want = [read_row(np.asarray(pages[s // 64]), s % 64, 64, "V4") for s in slots]
    np.testing.assert_array_equal(got, want)
    records = quantize_rows(jnp.full((1, 512), 7.0), layout=layout)
    write = jax.jit(write_records, static_argnames=("layout", "page_size"), donate_argnums=0)
    pages = write(pages, jnp.array([num_pages * 64 - 1]), records, layout=layout, page_size=page_size)
    assert (gather_dequant(pages, jnp.array([num_pages * 64 - 1]), layout=layout, page_size=page_size) == 7).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(pages=jnp.zeros((2, 37376), jnp.uint8)), r"`pages` must have a page stride of 37440 bytes.*got 37376"),
        (dict(pages=jnp.zeros((2, 37440), jnp.int8)), r"`pages` must have dtype uint8, got int8"),
        (
            dict(pages=jnp.zeros((2, 3, 37440), jnp.uint8)),
            r"`pages` must have shape \[num_pages, stride\], got \(2, 3, 37440\)",
        ),
        (dict(layout=KVLayout.V32), r"page stride of 41984 or more, a multiple of 16 bytes .*got 37440"),
        (dict(pages=[[1]]), r"`pages` must be an array, got list"),
        (dict(layout="V4"), r"`layout` must be a KVLayout \(KVLayout.V4, V32, BF16 or F32\), got 'V4'"),
        (dict(page_size=0), r"`page_size` of `pages` must be an int >= 1, got 0"),
        (dict(page_size=64.0), r"`page_size` of `pages` must be an int >= 1, got 64.0"),
        (dict(slots=jnp.zeros((2, 2), jnp.int32)), r"`slots` must have shape \[n\], got \(2, 2\)"),
        (dict(slots=jnp.zeros(2, jnp.float32)), r"`slots` must have dtype int32, got float32"),
        (dict(num_slots=jnp.zeros(2, jnp.int32)), r"`num_slots` must have shape \[\], got \(2,\)"),
        (dict(num_slots=2.5), r"`num_slots` must be an int >= 0, got 2.5"),
        (dict(num_slots="a"), r"`num_slots` must be an int >= 0, got 'a'"),
        (dict(implementation="cuda"), r"`implementation` of gather_dequant must be None, 'xla' or 'mosaic_gpu'"),
        (dict(implementation="xla", interpret=True), r"`interpret` of gather_dequant runs the Mosaic kernel"),
    ],
)
def test_bad_arguments(change, message):
    kwargs = dict(
        pages=jnp.zeros((2, 37440), jnp.uint8), slots=jnp.zeros(3, jnp.int32), layout=KVLayout.V4, page_size=64
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: gather_dequant(**(kwargs | change)))


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: quantize_rows(jnp.zeros((2, 511)), layout=KVLayout.V4),
            r"`rows` must be bfloat16 or float32 \[..., d=512\]",
        ),
        (lambda: quantize_rows(jnp.zeros((2, 512), int), layout=KVLayout.V4), r"`rows` must be .*got int32 \(2, 512\)"),
        (lambda: quantize_rows([1.0], layout=KVLayout.V4), r"`rows` must be .*got list"),
        (
            lambda: quantize_pages(jnp.zeros((2, 0, 512)), layout=KVLayout.V4, page_size=0),
            r"`page_size` must be an int >= 1",
        ),
        (lambda: quantize_pages(jnp.zeros((2, 4, 512)), layout=None, page_size=4), r"`layout` must be a KVLayout"),
    ],
)
def test_bad_rows(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_counts_under_x64(rng):
    """A Python int as live count is int32 in any mode."""
    pages = quantize_pages(rng.standard_normal((2, 8, 512)).astype(np.float32), layout=KVLayout.V4, page_size=8)
    for count in (2, 2**40):
        with jax.enable_x64(True):
            out = gather_dequant(pages, np.arange(4, dtype=np.int32), layout=KVLayout.V4, page_size=8, num_slots=count)
        assert out.shape == (4, 512)


def test_workspace_parts_go_together():
    pages, slots = jnp.zeros((2, 37440), jnp.uint8), jnp.zeros(3, jnp.int32)
    kwargs = dict(swa_layout=KVLayout.V4, swa_page_size=64, compressed_layout=KVLayout.V4, compressed_page_size=64)
    with pytest.raises(ValueError, match="`compressed_slots` and `compressed_pages` go together"):
        gather_workspace(pages, None, pages, slots, **kwargs)
    f32 = jnp.zeros((2, KVLayout.F32.page_stride(64)), jnp.uint8)
    with pytest.raises(ValueError, match=r"`compressed_layout` must give rows like `swa_layout` KVLayout.V4"):
        gather_workspace(f32, slots, pages, slots, **(kwargs | dict(compressed_layout=KVLayout.F32)))


def test_named_kernel_never_falls_back():
    """No kernel serves F32 pools: asking for it by name raises, with the reason."""
    pages, slots = jnp.zeros((2, KVLayout.F32.page_stride(64)), jnp.uint8), jnp.zeros(3, jnp.int32)
    with pytest.raises(NotImplementedError, match=r"implementation='mosaic_gpu' of gather_dequant: .*F32"):
        gather_dequant(pages, slots, layout=KVLayout.F32, page_size=64, implementation="mosaic_gpu")
