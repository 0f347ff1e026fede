"""The Hopper kernel of paged_mla_attention: in the interpreter, ahead of time, and on the GPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # the only place that tells
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import KVLayout, paged_mla_attention, quantize_pages
from pallas_kernels.kv_rows import dequantize_rows, write_records
from pallas_kernels.mosaic_paged_interpreted import InterpretedPaged
from pallas_kernels.paged_mla import mosaic_gpu
from tests.helpers.aot import assert_few_spills, compile_for_h200, h200_mesh
from tests.helpers.oracles import BF16, GOLDEN, assert_paged_close, golden
from tests.kernels.test_paged_mla import golden_arguments

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
V4, V32, PLAIN, PLAIN576 = KVLayout.V4, KVLayout.V32, KVLayout.BF16, KVLayout.BF16.with_d(576)
GOLDEN_FILES = sorted(p.name for p in (GOLDEN / "flashmla").glob("d*.npz"))
STRANGE = [-(2**31), -123456, -1, 2147480000, 2**31 - 1]


def pool(rng, slots, layout, page_size, used=None):
    """Pages with normal rows in the slots `used` (None: all), and 0xFF in every other byte."""
    rows = (rng.standard_normal((slots, layout.d)) / 10).clip(-1, 1).astype(np.float32)
    records = quantize_pages(rows[:, None], layout=layout, page_size=1)[:, : layout.bytes_per_token]
    pages = np.full((-(-slots // page_size), layout.page_stride(page_size)), 0xFF, np.uint8)
    ids = jnp.arange(slots, dtype=jnp.int32)
    ids = ids if used is None else jnp.where(jnp.isin(ids, jnp.array(sorted(used), jnp.int32)), ids, -1)
    return write_records(jnp.array(pages), ids, records, layout=layout, page_size=page_size)


def scene(
    rng,
    b,
    h_q,
    topk,
    extra_topk=0,
    layout=V4,
    extra_layout=None,
    page_size=16,
    extra_page_size=2,
    slots=70,
    extras=True,
):
    """Arguments with strange slots, empty rows and rounds, lengths and sinks; what no row selects is 0xFF."""

    def indices(n, slots):
        ids = rng.integers(-3, slots + 3, (b, n)).astype(np.int32)
        ids[0, :: max(1, n // 9)] = rng.choice([*STRANGE, slots, slots + 1], len(ids[0, :: max(1, n // 9)]))
        ids[b // 2, : min(128, n // 2)] = -1
        return ids

    def length(n):
        length = rng.integers(-3, n + 9, b).astype(np.int32)
        length[b - 1] = 0
        return length

    def used(ids, slots, length):
        selected = ids[np.arange(ids.shape[1]) < (np.full(b, ids.shape[1]) if length is None else length)[:, None]]
        return set(selected[(selected >= 0) & (selected < slots)])

    slots -= slots % page_size
    q = (rng.standard_normal((b, h_q, layout.d)) / 10).clip(-1, 1).astype(BF16)
    ids, n = indices(topk, slots), length(topk) if extras else None
    s = dict(
        q=jnp.array(q), pages=pool(rng, slots, layout, page_size, used(ids, slots, n)), indices=jnp.array(ids),
        layout=layout, page_size=page_size, sm_scale=0.5,
    )  # fmt: skip
    if extras:
        sink = rng.standard_normal(h_q).astype(np.float32)
        sink[: min(4, h_q)] = [np.inf, -np.inf, 1e4, -1e4][: min(4, h_q)]
        s |= dict(topk_length=jnp.array(n), attn_sink=jnp.array(sink))
    if extra_topk:
        extra_layout, extra_slots = extra_layout or layout, 30 - 30 % extra_page_size
        ids, n = indices(extra_topk, extra_slots), length(extra_topk) if extras else None
        extra_pages = pool(rng, extra_slots, extra_layout, extra_page_size, used(ids, extra_slots, n))
        s |= dict(extra_pages=extra_pages, extra_indices=jnp.array(ids), extra_layout=extra_layout)
        s |= dict(extra_page_size=extra_page_size) | (dict(extra_topk_length=jnp.array(n)) if extras else {})
    return s


def check(s, interpret=False):
    got = paged_mla_attention(**s, implementation="mosaic_gpu", interpret=interpret)
    assert not interpret or not get_races().races_found
    assert_paged_close(got, paged_mla_attention(**s, implementation="xla"))
    return [np.asarray(x) for x in got]


# ------------------------------------------------------------------------------------------------ interpreter, CPU
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(b=3, h_q=64, topk=140, extra_topk=200),
        dict(b=3, h_q=5, topk=128, extras=False),
        dict(b=2, h_q=100, topk=40, extra_topk=3, page_size=1, extra_page_size=3),
        dict(b=3, h_q=2, topk=130, extra_topk=140, layout=V32),
        dict(b=2, h_q=2, topk=130, extra_topk=140, layout=PLAIN576, extra_layout=V32),
        dict(b=2, h_q=2, topk=130, extra_topk=140, layout=PLAIN, extra_layout=V4),
    ],
    ids=str,
)
@pytest.mark.parametrize("parts", [1, 3])
def test_interpreted(rng, monkeypatch, fresh_caches, kwargs, parts):
    monkeypatch.setattr(mosaic_gpu, "parts_of_query", lambda *_: parts)
    check(scene(rng, **kwargs), INTERPRET)


@pytest.mark.parametrize("path", GOLDEN_FILES)
def test_golden_interpreted(path):
    """Two rows of FlashMLA's own output."""
    z = golden(f"flashmla/{path}")
    s = golden_arguments(z)
    rows = ("q", "indices", "topk_length", "extra_indices", "extra_topk_length")
    s = {k: v[:2] if k in rows and v is not None else v for k, v in s.items()}
    got = paged_mla_attention(**s, sm_scale=float(z["sm_scale"]), interpret=INTERPRET)
    assert_paged_close(got, (z["out"][:2, 0], z["lse"][:2, ..., 0]))


@pytest.mark.parametrize("sink", [None, -np.inf, 0.0, np.inf])
def test_rows_without_keys(rng, sink):
    s = scene(rng, 2, 3, 40, 20)
    zeros = jnp.array([0, -5], jnp.int32)
    s |= dict(topk_length=zeros, extra_topk_length=zeros, attn_sink=None if sink is None else jnp.full(3, sink))
    out, lse = paged_mla_attention(**s, interpret=INTERPRET)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.inf)


def test_a_pool_without_pages_adds_nothing(rng):
    s = scene(rng, 2, 3, 40, 20)
    main = {k: v for k, v in s.items() if "extra" not in k}
    without = s | dict(extra_pages=s["extra_pages"][:0])
    for a, b in zip(*(paged_mla_attention(**x, interpret=INTERPRET) for x in (without, main))):
        np.testing.assert_array_equal(a, b)


def test_race_detection_finds_an_early_arrival(rng, monkeypatch, fresh_caches):
    """Positive control: a half tile that is announced before it is written."""

    def convert(stage, turn, halves, j, pages_refs, now, then, layout, scales, buffer, barriers, k):
        plgpu.barrier_arrive(barriers.at[k])
        buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)

    monkeypatch.setattr(InterpretedPaged, "convert", staticmethod(convert))
    try:  # jax 0.11 takes a note of the race, 0.12 raises
        jax.block_until_ready(paged_mla_attention(**scene(rng, 1, 64, 128), interpret=INTERPRET))
        assert get_races().races_found
    except RuntimeError as error:
        assert "RACE DETECTED" in str(error)


def test_gradients_are_those_of_xla(rng):
    s = scene(rng, 2, 3, 40, 20)
    s["attn_sink"] = jnp.array([0.3, -0.2, 1.0])

    def loss(q, sink, **how):
        out, lse = paged_mla_attention(**(s | dict(q=q, attn_sink=sink)), **how)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    grads = [jax.grad(loss, (0, 1))(s["q"], s["attn_sink"], **how) for how in (dict(interpret=True), {})]
    for a, b in zip(*grads):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=2e-3, rtol=2e-2)


# ---------------------------------------------------------------------------------------------- dispatch, lowering
@pytest.mark.parametrize(
    "b, h_q, columns, parts",
    [
        (1, 64, (128, 512), 5), (1, 64, (128, 8192), 32), (1, 128, (128, 1024), 9), (8, 64, (128, 8192), 16),
        (64, 64, (128, 512), 1), (64, 64, (128, 1024), 2), (64, 128, (128, 8192), 1), (4096, 8, (640,), 1), (2, 8, (1,), 1),
    ],
)  # fmt: skip
def test_parts_of_query(b, h_q, columns, parts):
    assert mosaic_gpu.parts_of_query(b, h_q, columns) == parts


def program(b=4096, h_q=64, topk=128, extra_topk=512, layout=V4, extra_layout=None, extras=True, dtype=jnp.bfloat16):
    """A function and the shapes of its arguments."""
    sds, extra_layout = jax.ShapeDtypeStruct, extra_layout or layout
    shapes = dict(
        q=sds((b, h_q, layout.d), dtype), pages=sds((128, layout.page_stride(256)), jnp.uint8),
        indices=sds((b, topk), jnp.int32),
    )  # fmt: skip
    statics = dict(layout=layout, page_size=256, sm_scale=0.04, implementation="mosaic_gpu")
    if extras:
        shapes |= dict(topk_length=sds((b,), jnp.int32), attn_sink=sds((h_q,), jnp.float32))
    if extra_topk:
        shapes |= dict(extra_pages=sds((512, extra_layout.page_stride(64)), jnp.uint8))
        shapes |= dict(extra_indices=sds((b, extra_topk), jnp.int32))
        shapes |= dict(extra_topk_length=sds((b,), jnp.int32)) if extras else {}
        statics |= dict(extra_layout=extra_layout, extra_page_size=64)

    def attend(*args):
        return paged_mla_attention(**dict(zip(shapes, args)), **statics)

    return attend, list(shapes.values())


@pytest.mark.parametrize(
    "kwargs, reason",
    [
        (dict(dtype=jnp.float32), "bfloat16"),
        (dict(layout=KVLayout.F32), "float32"),
        (dict(extra_layout=KVLayout.F32), "float32"),
        (dict(h_q=129), "128 heads"),
    ],
)
def test_unsupported(kwargs, reason):
    attend, shapes = program(**kwargs)
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu' of paged_mla_attention: .*{reason}"):
        jax.eval_shape(attend, *shapes)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("b", [4096, 4])
def test_never_falls_back(b, x64):
    """The text lowered for a GPU holds the kernel by its name, one launch, no gather of rows, no dot."""
    attend, shapes = program(b=b)
    with jax.enable_x64(x64):
        text = jax.jit(attend).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert f"{mosaic_gpu.KERNEL_NAME}_mosaic_gpu" in text
    for op in ("dot_general", "gather", "pad", "concatenate"):
        assert f"stablehlo.{op}" not in text


AOT = [
    dict(), dict(h_q=128, extra_topk=1024), dict(extras=False), dict(h_q=20, extra_topk=0), dict(b=8),
    dict(h_q=128, topk=2048, extra_topk=0, layout=V32), dict(layout=PLAIN), dict(layout=PLAIN, extra_layout=V4),
    dict(h_q=128, topk=2048, extra_topk=0, layout=PLAIN576),
]  # fmt: skip
MAX_SPILL_BYTES = 48  # partial heads have 32, parts 44, all others 8 or none; more means that an accumulator went out


@pytest.mark.aot
@pytest.mark.parametrize("kwargs", AOT, ids=str)
def test_compiles_for_hopper(kwargs, capfd, monkeypatch):
    """Few spilled bytes and no wgmma that ptxas serialises."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    attend, shapes = program(**kwargs)
    assert f"{mosaic_gpu.KERNEL_NAME}_mosaic_gpu" in compile_for_h200(attend, *shapes).as_text()
    assert_few_spills("".join(capfd.readouterr()), MAX_SPILL_BYTES)


@pytest.mark.aot
def test_compiles_sharded_and_in_a_cond():
    mesh = h200_mesh((2,), ("cp",))
    specs = (P("cp"), P(), P("cp"), P())

    def local(q, pages, indices, pick):
        def attend(implementation):
            return lambda: paged_mla_attention(
                q, pages, indices, layout=V4, page_size=256, sm_scale=0.04, implementation=implementation
            )

        return lax.cond(pick, attend("mosaic_gpu"), attend("xla"))

    shapes = [*program(b=64, extra_topk=0, extras=False)[1], jax.ShapeDtypeStruct((), jnp.bool)]
    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x, spec in zip(shapes, specs)
    ]
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("cp"))
    assert "mosaic_gpu" in compile_for_h200(fn, *args).as_text()


# ---------------------------------------------------------------------------------------------------------- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("path", GOLDEN_FILES)
def test_golden(path):
    z = golden(f"flashmla/{path}")
    got = paged_mla_attention(**golden_arguments(z), sm_scale=float(z["sm_scale"]), implementation="mosaic_gpu")
    assert_paged_close(got, (z["out"][:, 0], z["lse"][..., 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("layout, extra_layout", [(V4, V4), (V32, V32), (V32, PLAIN576), (PLAIN, PLAIN), (PLAIN, V4)])
@pytest.mark.parametrize(
    "b, h_q, topk, extra_topk", [(1, 64, 128, 512), (8, 128, 128, 300), (150, 20, 700, 0), (300, 128, 128, 200)]
)
@pytest.mark.parametrize("page_size, extra_page_size", [(256, 64), (1, 3)])
def test_on_gpu(rng, b, h_q, topk, extra_topk, layout, extra_layout, page_size, extra_page_size):
    """Against plain jnp; two runs are equal bit by bit."""
    kwargs = dict(layout=layout, extra_layout=extra_layout, page_size=page_size, extra_page_size=extra_page_size)
    s = scene(rng, b, h_q, topk, extra_topk, **kwargs, slots=700)
    for a, c in zip(check(s), check(s)):
        np.testing.assert_array_equal(a, c)


def lone_rows(records):
    """The outputs of rows that select one slot each, with q = 0: the dequantised rows themselves."""
    n = len(records)
    pages = jnp.full((-(-n // 16), V4.page_stride(16)), 0xFF, jnp.uint8)
    ids = jnp.arange(n, dtype=jnp.int32)
    pages = write_records(pages, ids, jnp.array(records), layout=V4, page_size=16)
    q = jnp.zeros((n, 1, 512), jnp.bfloat16)
    how = dict(layout=V4, page_size=16, sm_scale=1.0, implementation="mosaic_gpu")
    return np.asarray(paged_mla_attention(q, pages, ids[:, None], **how).out[:, 0])


@pytest.mark.gpu
def test_every_byte_with_every_scale(rng):
    """Bit by bit what `dequantize_rows` gives, wherever that is finite; what it flushes may be subnormal."""
    values = np.resize(np.arange(256, dtype=np.uint8), (1029, 64))
    scales = np.resize(np.repeat(np.arange(255, dtype=np.uint8), 4), 1029)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0 ** (scales.astype(int) - 127)[:, None]
        values[~np.isfinite(exact.astype(np.float32))] = 0
    records = np.zeros((147, 584), np.uint8)
    records[:, :448], records[:, 576:583] = values.reshape(147, 448), scales.reshape(147, 7)
    records[:, 448:576] = rng.standard_normal((147, 64)).astype(BF16).view(np.uint8)
    records[:, 583] = 0xFF
    want = np.asarray(dequantize_rows(jnp.array(records), layout=V4))
    got = lone_rows(records)
    np.testing.assert_array_equal(got[want != 0].view(np.uint16), want[want != 0].view(np.uint16))
    assert np.abs(got[want == 0].astype(np.float32)).max() < 2.0**-126


@pytest.mark.gpu
def test_nan_shows():
    """A NaN value, or scale, anywhere in a selected row makes its output NaN."""
    records = np.zeros((904, 584), np.uint8)
    records[:, 576:583] = 127
    records[np.arange(448), np.arange(448)], records[448 + np.arange(448), np.arange(448)] = 0x7F, 0xFF
    records[896 + np.arange(7), 576 + np.arange(7)] = 0xFF
    got = lone_rows(records).astype(np.float32)
    assert np.isnan(got[:903]).all() and not got[903].any()


@pytest.mark.gpu
@pytest.mark.slow
def test_past_32_bits(rng):
    """A pool of 4.5 GB and 70,000 rows."""
    pages = jnp.zeros((120_000, V4.page_stride(64)), jnp.uint8)
    rows = (rng.standard_normal((128, 512)) / 10).astype(np.float32)
    records = quantize_pages(rows[:, None], layout=V4, page_size=1)[:, :584]
    ids = 120_000 * 64 - 128 + jnp.arange(128, dtype=jnp.int32)
    pages = jax.jit(lambda *a: write_records(*a, layout=V4, page_size=64), donate_argnums=0)(pages, ids, records)
    q = jnp.array((rng.standard_normal((1, 64, 512)) / 10).astype(BF16))
    how = dict(layout=V4, page_size=64, sm_scale=0.5)
    want = paged_mla_attention(q, pages, ids[None], **how, implementation="xla")
    many = jnp.broadcast_to(q, (70_000, 64, 512)), pages, jnp.broadcast_to(ids, (70_000, 128))
    out, lse = paged_mla_attention(*many, **how, implementation="mosaic_gpu")
    for t in (0, 35_000, 69_999):
        assert_paged_close((out[t], lse[t]), (want.out[0], want.lse[0]))
