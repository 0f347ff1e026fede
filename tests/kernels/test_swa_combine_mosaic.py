"""The Hopper kernel of combine_swa_indices: in the interpreter, ahead of time, and on the GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import combine_swa_indices
from pallas_kernels.swa_combine import mosaic_gpu
from tests.helpers.aot import compile_for_h200

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
GPU_ROWS = [1, 65_536, 70_000, 131_072]


def random_inputs(seed: int, rows: int, topk: int, *, explicit: bool, num_reqs: int = 3, max_pos: int = 9_000):
    """Arguments in order: rows with holes, padding rows, requests that do not exist, early and late positions."""
    rng = np.random.default_rng(seed)
    topk_indices = rng.integers(-1, 5_000, (rows, topk)).astype(np.int32) if explicit else None
    query_pos = rng.integers(0, max_pos, rows).astype(np.int32)
    query_pos[: min(rows, 3)] = [0, 126, 127][:rows]
    query_req = rng.integers(0, num_reqs, rows).astype(np.int32)
    query_req[5::7] = rng.choice([-1, -7, num_reqs, 2**31 - 1], len(query_req[5::7]))
    bases = [rng.integers(0, 100_000, num_reqs).astype(np.int32) for _ in range(3)]
    return topk_indices, query_pos, query_req, *bases


def rows_by_definition(
    topk_indices, query_pos, query_req, compressed_base, swa_base, swa_first_pos, *, compress_ratio, topk, window=128
):
    """A Python loop over the rows."""
    rows, num_reqs = len(query_pos), len(swa_base)
    indices = np.full((rows, -(-(topk + window) // 128) * 128), -1, np.int32)
    lengths = np.zeros(rows, np.int32)
    for t in range(rows):
        request, pos = int(query_req[t]), int(query_pos[t])
        if not 0 <= request < num_reqs:
            continue
        topk_len = min((pos + 1) // compress_ratio, topk) if topk else 0
        swa_len = min(pos + 1, window)
        for j in range(topk_len):
            entry = j if topk_indices is None else int(topk_indices[t, j])
            indices[t, j] = entry + compressed_base[request] if entry >= 0 else -1
        for j in range(swa_len):
            indices[t, topk_len + j] = swa_base[request] + (pos - swa_len + 1 - swa_first_pos[request]) + j
        lengths[t] = topk_len + swa_len
    return indices, lengths


def on_device(args):
    return [None if x is None else jnp.array(x) for x in args]


def assert_same(got, want):
    np.testing.assert_array_equal(np.asarray(got[0]), want[0])
    np.testing.assert_array_equal(np.asarray(got[1]), want[1])


@pytest.mark.parametrize(
    "rows, topk, explicit, compress_ratio, window",
    [
        (1, 0, True, 1, 128),  # c0
        (6, 0, False, 1, 128),
        (9, 512, True, 4, 128),  # c4
        (4, 1024, True, 4, 128),
        (7, 8, True, 128, 128),  # width 256
        (5, 6, True, 4, 120),  # rows of top-k that are not 16-byte aligned
        (5, 130, True, 3, 1),
        (3, 2_000, False, 128, 128),  # c128: two blocks a row, the second one overhanging
    ],
)
def test_rows_are_those_of_the_definition(rows, topk, explicit, compress_ratio, window):
    args = random_inputs(rows, rows, topk, explicit=explicit, max_pos=300_000 if compress_ratio == 128 else 9_000)
    sizes = dict(compress_ratio=compress_ratio, window=window)
    got = combine_swa_indices(*on_device(args), **sizes, topk=None if explicit else topk, interpret=INTERPRET)
    assert_same(got, rows_by_definition(*args, **sizes, topk=topk))


def test_holes_stay_holes():
    one = [jnp.array([x], jnp.int32) for x in (15, 0, 1_000, 0, 0)]
    got = combine_swa_indices(jnp.array([[7, -1, 3, -1]], jnp.int32), *one, compress_ratio=4, interpret=INTERPRET)
    assert got.indices[0, :6].tolist() == [1007, -1, 1003, -1, 0, 1]
    assert got.indices[0, 20:].tolist() == [-1] * (256 - 20)
    assert got.lengths.tolist() == [4 + 16]


@pytest.mark.parametrize(
    "ratio, topk, rows",
    [  # rows (prefix, extend, cp, rank, k, length, first SWA id) of as many requests: compressed_base 0, swa_base c_max
        (4, 512, [(0, 8, 4, 1, 1, 7, 2), (5, 8, 4, 0, 1, 12, 3), (1000, 64, 8, 3, 2, 383, 285), (0, 4, 4, 3, 0, 5, 1)]),
        (128, 8, [(1000, 64, 8, 3, 2, 135, 27), (126, 1024, 2, 0, 0, 127, 8), (126, 1024, 2, 1, 0, 129, 8)]),
        (None, 0, [(1000, 64, 8, 3, 2, 128, 19)]),
    ],
)
def test_strided_rows(ratio, topk, rows):
    prefix, extend, cp, rank, k, length, first_swa = np.array(rows, np.int32).T
    seq_len, pos = prefix + extend, prefix + rank + cp * k
    swa_base = np.maximum(seq_len // ratio, 1) if ratio else np.zeros_like(pos)
    first_pos = seq_len - np.minimum(seq_len, extend + 127)
    args = [jnp.array(x, jnp.int32) for x in (pos, range(len(rows)), np.zeros_like(pos), swa_base, first_pos)]
    got = combine_swa_indices(None, *args, compress_ratio=ratio or 1, topk=topk, interpret=INTERPRET)
    assert got.lengths.tolist() == length.tolist()
    for t in range(len(rows)):
        swa_len = min(pos[t] + 1, 128)
        want = [*range(length[t] - swa_len), *range(first_swa[t], first_swa[t] + swa_len)]
        assert got.indices[t].tolist() == want + [-1] * (got.indices.shape[1] - length[t])


def test_empty_shapes():
    none = jnp.zeros(0, jnp.int32)
    kwargs = dict(compress_ratio=4, implementation="mosaic_gpu", interpret=INTERPRET)
    got = combine_swa_indices(jnp.zeros((0, 16), jnp.int32), none, none, *[jnp.zeros(1, jnp.int32)] * 3, **kwargs)
    assert got.indices.shape == (0, 256) and got.lengths.shape == (0,)
    got = combine_swa_indices(jnp.zeros((2, 16), jnp.int32), *[jnp.zeros(2, jnp.int32)] * 2, none, none, none, **kwargs)
    assert got.indices.tolist() == [[-1] * 256] * 2 and got.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("topk, rows", [(None, 65_536), (0, 131_072), *((512, rows) for rows in GPU_ROWS)])
def test_the_named_kernel_is_what_runs(topk, rows):
    """The text lowered for a GPU holds the kernel by its name, and nothing that would build the rows otherwise."""

    def combine(topk_indices, *args):
        return combine_swa_indices(
            topk_indices, *args, compress_ratio=4, topk=8192 if topk is None else None, implementation="mosaic_gpu"
        )

    row, request = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    topk_indices = None if topk is None else jax.ShapeDtypeStruct((rows, topk), jnp.int32)
    traced = jax.jit(combine).trace(topk_indices, row, row, request, request, request)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert f"{mosaic_gpu.KERNEL_NAME}_mosaic_gpu" in text
    assert "stablehlo.select" not in text and "stablehlo.pad" not in text


def test_jit_and_cond_trace_once():
    traces = []

    @jax.jit
    def run(pick, *args):
        traces.append(None)

        def combine(**kwargs):
            return lambda: combine_swa_indices(*args, compress_ratio=4, **kwargs)

        return lax.cond(pick, combine(interpret=INTERPRET), combine(implementation="xla"))

    for seed in (0, 1):
        args = random_inputs(seed, 5, 20, explicit=True)
        for pick in (True, False):
            assert_same(run(pick, *on_device(args)), rows_by_definition(*args, compress_ratio=4, topk=20))
    assert len(traces) == 1


@pytest.mark.parametrize("check_vma, axis_type", [(True, AxisType.Auto), (False, AxisType.Explicit)], ids=str)
def test_shard_map_over_rows(check_vma, axis_type):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    mesh = jax.make_mesh((2,), ("cp",), (axis_type,), devices=jax.devices()[:2])
    args = random_inputs(3, 10, 12, explicit=True)

    def local(pick, *args):
        def combine(**kwargs):
            return lambda: combine_swa_indices(*args, compress_ratio=4, **kwargs)

        return lax.cond(pick, combine(interpret=INTERPRET), combine(implementation="xla"))

    specs = P(), P("cp"), P("cp"), P("cp"), P(), P(), P()
    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("cp"), check_vma=check_vma))
    for pick in (True, False):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((pick, *args), specs)]
        assert_same(sharded(*placed), rows_by_definition(*args, compress_ratio=4, topk=12))


@pytest.mark.aot
@pytest.mark.parametrize("rows, topk, explicit", [(16_384, 512, True), (16_384, 1024, True), (131_072, 8192, False)])
def test_compiles_for_hopper_without_spills(rows, topk, explicit, capfd, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    row, request = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((3,), jnp.int32)
    operands = [row, row, request, request, request]
    if explicit:
        operands.insert(0, jax.ShapeDtypeStruct((rows, topk), jnp.int32))

    def combine(*args):
        args = args if explicit else (None, *args)
        return combine_swa_indices(
            *args, compress_ratio=4, topk=None if explicit else topk, implementation="mosaic_gpu"
        )

    compile_for_h200(combine, *operands)
    log = "".join(capfd.readouterr())
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.gpu
@pytest.mark.parametrize("rows", GPU_ROWS)
@pytest.mark.parametrize("topk, explicit", [(0, True), (512, True), (6, True), (1_500, False)])
def test_gpu_rows_are_those_of_xla(topk, explicit, rows):
    args = on_device(random_inputs(rows, rows, topk, explicit=explicit, max_pos=20_000))
    run = jax.jit(combine_swa_indices, static_argnames=("compress_ratio", "topk", "implementation"))
    sizes = dict(compress_ratio=4, topk=None if explicit else topk)
    got = run(*args, **sizes, implementation="mosaic_gpu")
    assert_same(got, [np.asarray(x) for x in run(*args, **sizes, implementation="xla")])
