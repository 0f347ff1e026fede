"""The Hopper kernel of gather_dequant and gather_workspace: in the interpreter, ahead of time, and on the GPU."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import KVLayout, gather_dequant, gather_workspace
from pallas_kernels.gather_dequant import mosaic_gpu
from tests.helpers.aot import compile_for_h200, h200_mesh

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
LAYOUTS = [KVLayout.V4, KVLayout.V32, KVLayout.BF16, KVLayout.BF16.with_d(576)]
STRANGE_SLOTS = [-(2**31), -123456, -1, 2147480000, 2**31 - 1]


def random_pages(rng, layout: KVLayout, page_size: int, num_pages: int) -> np.ndarray:
    """Random bytes everywhere, slack included, but for the scales: V4 bytes 10 to 255, V32 ordinary floats."""
    pages = rng.integers(0, 256, (num_pages, layout.page_stride(page_size)), dtype=np.uint8)
    for token in range(page_size if layout.d_fp8 else 0):
        at = layout.scale_offset(page_size) + token * layout.scale_stride
        if layout.scale_bits == 8:
            pages[:, at : at + layout.num_scales] = rng.integers(10, 256, (num_pages, layout.num_scales))
        else:
            scales = rng.standard_normal((num_pages, layout.num_scales)).astype(np.float32)
            pages[:, at : at + 4 * layout.num_scales] = scales.view(np.uint8)
    return pages


def random_slots(rng, page_size: int, num_pages: int, n: int) -> np.ndarray:
    """Slots in any order, repeated ones and some outside the pool among them."""
    slots = rng.integers(-2, page_size * num_pages + 2, n).astype(np.int32)
    slots[: len(STRANGE_SLOTS) + 2] = [*STRANGE_SLOTS, page_size * num_pages, page_size * num_pages - 1][:n]
    return slots


def rows_by_definition(pages, slots, layout: KVLayout, page_size: int) -> np.ndarray:
    """A NumPy loop over the rows, float32."""
    out = np.zeros((len(slots), layout.d), np.float32)
    for i, slot in enumerate(np.asarray(slots).tolist()):
        if not 0 <= slot < len(pages) * page_size:
            continue
        page, token = divmod(slot, page_size)
        data = pages[page, token * layout.data_bytes :]
        if layout.d_fp8:
            scales = pages[page, layout.scale_offset(page_size) + token * layout.scale_stride :]
            if layout.scale_bits == 8:
                byte = scales[: layout.num_scales].astype(np.int32)
                scales = np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127)).astype(np.float32)
            else:
                scales = scales[: 4 * layout.num_scales].view(np.float32)
            fp8 = data[: layout.d_fp8].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                out[i, : layout.d_fp8] = (fp8 * np.repeat(scales, layout.tile)).astype(ml_dtypes.bfloat16)
        plain = data[layout.plain_offset : layout.data_bytes].view(ml_dtypes.bfloat16)
        out[i, layout.d_fp8 :] = plain.astype(np.float32)
    return out


def assert_same(got, want):
    """Bitwise, but for the payload of a NaN; signed zeros count."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    bits = [np.where(np.isnan(x), np.float32(0), x).view(np.int32) for x in (got, want)]
    np.testing.assert_array_equal(*bits)


@pytest.mark.parametrize("page_size", [1, 48, 256])
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_rows_are_those_of_the_definition(layout, page_size):
    rng = np.random.default_rng(page_size)
    pages = random_pages(rng, layout, page_size, 3)
    slots = random_slots(rng, page_size, 3, 53)
    got = gather_dequant(jnp.array(pages), jnp.array(slots), layout=layout, page_size=page_size, interpret=INTERPRET)
    assert got.dtype == jnp.bfloat16
    assert_same(got, rows_by_definition(pages, slots, layout, page_size))


@pytest.mark.parametrize("scale", [10, 114, 254, 255])
def test_every_fp8_byte_under_a_scale(scale):
    """All 256 bytes lie in one token; the scales of its neighbouring tiles do not reach over."""
    layout, page_size = KVLayout.V4, 2
    pages = np.full((1, layout.page_stride(page_size)), 0xFF, np.uint8)
    pages[0, :448] = np.arange(448) % 256
    pages[0, 448:576] = 0
    at = layout.scale_offset(page_size)
    pages[0, at : at + 7] = [scale, 127, scale, 128, scale, 126, 127]
    slots = np.zeros(1, np.int32)
    got = gather_dequant(jnp.array(pages), jnp.array(slots), layout=layout, page_size=page_size, interpret=INTERPRET)
    assert_same(got, rows_by_definition(pages, slots, layout, page_size))
    nan_tiles = np.isnan(np.asarray(got, np.float32)).reshape(8, 64).all(1)
    assert nan_tiles.tolist() == [scale == 255, False] * 3 + [False, False]


@pytest.mark.parametrize("live", [-3, 0, 1, 37, 1000])
def test_rows_past_the_live_count_are_not_written(live):
    layout, page_size = KVLayout.V4, 64
    rng = np.random.default_rng(0)
    pages = random_pages(rng, layout, page_size, 2)
    pages[:, layout.scale_offset(page_size) :] = 127
    pages[:, : layout.scale_offset(page_size)] &= 0x3F  # no NaN: they are the interpreter's mark of unwritten memory
    slots = rng.integers(0, 128, 45).astype(np.int32)
    got = gather_dequant(
        jnp.array(pages), jnp.array(slots), layout=layout, page_size=page_size, num_slots=jnp.int32(live),
        interpret=INTERPRET,
    )  # fmt: skip
    live = min(max(live, 0), 45)
    assert_same(got[:live], rows_by_definition(pages, slots[:live], layout, page_size))
    assert np.isnan(np.asarray(got[live:], np.float32)).all()


@pytest.mark.parametrize(
    "layouts, page_sizes, counts",
    [
        ((KVLayout.V4, KVLayout.V4), (64, 256), (None, None)),
        ((KVLayout.V4, KVLayout.V4), (2, 256), (33, 21)),
        ((KVLayout.V4, KVLayout.BF16), (64, 1), (0, 40)),
        ((KVLayout.V32, KVLayout.BF16.with_d(576)), (64, 64), (None, 0)),
        ((None, KVLayout.V4), (None, 256), (None, 39)),
    ],
    ids=str,
)
def test_workspace_is_both_gathers_in_one_buffer(layouts, page_sizes, counts):
    rng = np.random.default_rng(1)
    pools, want = [], []
    for layout, page_size, count, n in zip(layouts, page_sizes, counts, (41, 67), strict=True):
        if layout is None:
            pools.append((None, None, None))
            continue
        pages = random_pages(rng, layout, page_size, 3)
        slots = random_slots(rng, page_size, 3, n)
        pools.append((jnp.array(pages), jnp.array(slots), None if count is None else jnp.int32(count)))
        live = n if count is None else count
        want.append((n, live, rows_by_definition(pages, slots[:live], layout, page_size)))
    (pages_c, slots_c, count_c), (pages_s, slots_s, count_s) = pools
    got = gather_workspace(
        pages_c, slots_c, pages_s, slots_s,
        compressed_layout=layouts[0], compressed_page_size=page_sizes[0], swa_layout=layouts[1],
        swa_page_size=page_sizes[1], num_compressed=count_c, num_swa=count_s, interpret=INTERPRET,
    )  # fmt: skip
    assert got.shape == (sum(n for n, _, _ in want), layouts[1].d)
    first = 0
    for n, live, rows in want:
        assert_same(got[first : first + live], rows)
        first += n


@pytest.mark.parametrize("n, num_pages", [(0, 3), (5, 0), (0, 0)])
def test_empty_shapes(n, num_pages):
    layout = KVLayout.V4
    pages = jnp.full((num_pages, layout.page_stride(2)), 0xFF, jnp.uint8)
    kwargs = dict(implementation="mosaic_gpu", interpret=INTERPRET)
    got = gather_dequant(pages, jnp.zeros(n, jnp.int32), layout=layout, page_size=2, **kwargs)
    assert got.shape == (n, 512) and not got.any()
    got = gather_workspace(
        pages, jnp.zeros(n, jnp.int32), jnp.zeros((1, layout.page_stride(1)), jnp.uint8), jnp.zeros(1, jnp.int32),
        compressed_layout=layout, compressed_page_size=2, swa_layout=layout, swa_page_size=1, **kwargs,
    )  # fmt: skip
    assert got.shape == (n + 1, 512) and not got.any()


def test_float32_rows_are_refused():
    pages = jnp.zeros((1, KVLayout.F32.page_stride(1)), jnp.uint8)
    with pytest.raises(NotImplementedError, match=r"F32.*float32"):
        gather_dequant(pages, jnp.zeros(1, jnp.int32), layout=KVLayout.F32, page_size=1, implementation="mosaic_gpu")
    assert mosaic_gpu.unsupported(*LAYOUTS) is None


@pytest.mark.parametrize("n", [1, 65_536, 70_000, 131_072])
def test_the_named_kernel_is_what_runs(n):
    """The text lowered for a GPU holds the kernel by its name, and no gather of XLA's."""
    pages = jax.ShapeDtypeStruct((3, KVLayout.V4.page_stride(64)), jnp.uint8)
    slots = jax.ShapeDtypeStruct((n,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def one(pages, slots, count):
        return gather_dequant(
            pages, slots, layout=KVLayout.V4, page_size=64, num_slots=count, implementation="mosaic_gpu"
        )

    def two(pages, slots, count):
        return gather_workspace(
            pages, slots, pages, slots, compressed_layout=KVLayout.V4, compressed_page_size=64, swa_layout=KVLayout.V4,
            swa_page_size=64, num_compressed=count, num_swa=count, implementation="mosaic_gpu",
        )  # fmt: skip

    for fn in (one, two):
        text = jax.jit(fn).trace(pages, slots, count).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1  # the workspace, too, is one launch
        assert f"{mosaic_gpu.KERNEL_NAME}_mosaic_gpu" in text
        assert "stablehlo.gather" not in text and "stablehlo.concatenate" not in text


def test_jit_and_cond_trace_once_for_all_counts():
    layout = KVLayout.V4
    rng = np.random.default_rng(2)
    pages = random_pages(rng, layout, 2, 4)
    slots = random_slots(rng, 2, 4, 20)
    traces = []

    @jax.jit
    def run(pages, slots, count, pick):
        traces.append(None)

        def gather(implementation, **kwargs):
            return lambda: gather_dequant(
                pages, slots, layout=layout, page_size=2, num_slots=count, implementation=implementation, **kwargs
            )

        return lax.cond(pick, gather("mosaic_gpu", interpret=INTERPRET), gather("xla"))

    for count in (20, 3):
        for pick in (True, False):
            got = run(pages, slots, jnp.int32(count), pick)
            assert_same(got[:count], rows_by_definition(pages, slots[:count], layout, 2))
    assert len(traces) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_rows(check_vma, axis_type):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    layout = KVLayout.V4
    mesh = jax.make_mesh((2,), ("cp",), (axis_type,), devices=jax.devices()[:2])
    rng = np.random.default_rng(3)
    pages = random_pages(rng, layout, 2, 4)
    slots = random_slots(rng, 2, 4, 40)

    def local(pages, slots, pick):
        def gather(**kwargs):
            return lambda: gather_dequant(pages, slots, layout=layout, page_size=2, **kwargs)

        return lax.cond(pick, gather(interpret=INTERPRET), gather(implementation="xla"))

    specs = P(), P("cp"), P()
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("cp"), check_vma=check_vma))
    for pick in (True, False):
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((pages, slots, pick), specs)]
        assert_same(sharded(*args), rows_by_definition(pages, slots, layout, 2))


@pytest.mark.aot
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_compiles_for_hopper_without_spills(layout, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    pages = jax.ShapeDtypeStruct((5000, layout.page_stride(64)), jnp.uint8)
    slots = jax.ShapeDtypeStruct((70_000,), jnp.int32)
    count = jax.ShapeDtypeStruct((), jnp.int32)

    def workspace(pages, slots, count):
        return gather_workspace(
            pages, slots, pages, slots, compressed_layout=layout, compressed_page_size=64, swa_layout=layout,
            swa_page_size=64, num_compressed=count, num_swa=count, implementation="mosaic_gpu",
        )  # fmt: skip

    compile_for_h200(workspace, pages, slots, count)
    log = "".join(capfd.readouterr())
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.aot
@pytest.mark.parametrize("check_vma", [True, False])
def test_compiles_sharded_and_in_a_cond(check_vma):
    """Each of two H200s gathers its slots by the kernel or by XLA, as a traced flag says, with a traced count."""
    mesh = h200_mesh((2,), ("cp",))
    layout = KVLayout.V4

    def local(pages, slots, count, pick):
        def gather(implementation):
            return lambda: gather_dequant(
                pages, slots, layout=layout, page_size=64, num_slots=count, implementation=implementation
            )

        return lax.cond(pick, gather("mosaic_gpu"), gather("xla"))

    args = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in (
            ((50, layout.page_stride(64)), jnp.uint8, P()),
            ((1024,), jnp.int32, P("cp")),
            ((), jnp.int32, P()),
            ((), jnp.bool, P()),
        )
    ]
    specs = tuple(x.sharding.spec for x in args)
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("cp"), check_vma=check_vma)
    assert "mosaic_gpu" in compile_for_h200(fn, *args).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [1, 65_536, 70_000, 131_072])
@pytest.mark.parametrize("layout, page_size", [(KVLayout.V4, 64), (KVLayout.V32, 64), (KVLayout.BF16, 2)], ids=str)
def test_gpu_rows_are_those_of_xla(layout, page_size, n):
    rng = np.random.default_rng(n)
    pages = jnp.array(random_pages(rng, layout, page_size, 400))
    slots = jnp.array(random_slots(rng, page_size, 400, n))
    run = jax.jit(gather_dequant, static_argnames=("layout", "page_size", "implementation"))
    got = run(pages, slots, layout=layout, page_size=page_size, implementation="mosaic_gpu")
    want = run(pages, slots, layout=layout, page_size=page_size, implementation="xla")
    assert_same(got, want)


@pytest.mark.gpu
def test_gpu_every_fp8_byte_under_every_scale_byte():
    """Also those whose scale or product is subnormal in float32: the GPU keeps them."""
    layout, token = KVLayout.V4, np.arange(256)
    pages = np.full((256, layout.page_stride(1)), 0xFF, np.uint8)
    pages[:, :448] = (np.arange(448) + 37 * token[:, None]) % 256
    pages[:, 448:576] = 0
    pages[:, 576:583] = token[:, None]
    got = gather_dequant(pages, token.astype(np.int32), layout=layout, page_size=1, implementation="mosaic_gpu")
    assert_same(got, rows_by_definition(pages, token, layout, 1))


@pytest.mark.gpu
def test_gpu_workspace_with_live_counts():
    rng = np.random.default_rng(4)
    layout = KVLayout.V4
    compressed = random_pages(rng, layout, 64, 200), random_slots(rng, 64, 200, 9_000)
    swa = random_pages(rng, layout, 256, 60), random_slots(rng, 256, 60, 12_345)

    @jax.jit
    def run(*args, **counts):
        return gather_workspace(
            *args, **counts, compressed_layout=layout, compressed_page_size=64, swa_layout=layout, swa_page_size=256,
            implementation="mosaic_gpu",
        )  # fmt: skip

    got = run(*compressed, *swa, num_compressed=jnp.int32(777), num_swa=jnp.int32(12_001))
    assert_same(got[:777], rows_by_definition(compressed[0], compressed[1][:777], layout, 64))
    assert_same(got[9_000:21_001], rows_by_definition(swa[0], swa[1][:12_001], layout, 256))


@pytest.mark.gpu
@pytest.mark.slow
def test_gpu_addresses_past_two_gib():
    """57,600 pages of 64 tokens: byte offsets pass 2^31 at page 57,359. 4.3 million rows: the output passes it, too."""
    layout, num_pages = KVLayout.V4, 57_600
    marked = [0, 57_357, 57_358, 57_359, num_pages - 1]
    rng = np.random.default_rng(5)
    few = random_pages(rng, layout, 64, len(marked))
    pages = jnp.zeros((num_pages, few.shape[1]), jnp.uint8).at[jnp.array(marked)].set(few)
    tokens = np.arange(64 * len(marked))
    slots = jnp.array(np.array(marked)[tokens // 64] * 64 + tokens % 64, jnp.int32)
    n = 4_300_000
    all_slots = jnp.full((n,), -1, jnp.int32).at[n - len(tokens) :].set(slots)
    run = jax.jit(gather_dequant, static_argnames=("layout", "page_size", "implementation"))
    got = run(pages, all_slots, layout=layout, page_size=64, implementation="mosaic_gpu")[n - len(tokens) :]
    assert_same(got, rows_by_definition(few, tokens, layout, 64))
