"""The Hopper kernel of sparse_mla_attention: in the interpreter, ahead of time, and on the GPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races  # the only place that tells
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import profile_kernel
from pallas_kernels import sparse_mla_attention
from pallas_kernels.mosaic_interpreted import Interpreted
from pallas_kernels.sparse_mla import mosaic_gpu
from tests.helpers.aot import assert_few_spills, compile_for_h200, h200_mesh
from tests.helpers.oracles import (
    BF16,
    GOLDEN,
    assert_sparse_close,
    golden,
    one_hot_kv,
    one_hot_out,
    sparse_attention,
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
STRANGE = [-(2**31), -123456, -1, 2147480000, 2**31 - 1]
GOLDEN_FILES = sorted(p.name for p in (GOLDEN / "flashmla").glob("p*.npz"))


def run(q, kv, indices, topk_length=None, attn_sink=None, *, sm_scale=0.05, interpret=INTERPRET):
    args = [None if x is None else jnp.array(x) for x in (q, kv, indices, topk_length, attn_sink)]
    out = sparse_mla_attention(*args, sm_scale=sm_scale, implementation="mosaic_gpu", interpret=interpret)
    assert not interpret or not get_races().races_found
    return [np.asarray(x) for x in out]


def inputs(rng, s_q, h_q, s_kv, topk, d=512):
    """Values of the size FlashMLA tests with; row 3 is never selected and NaN; strange ids and empty blocks among them."""
    q = (rng.standard_normal((s_q, h_q, d)) / 10).clip(-1, 1).astype(BF16)
    kv = (rng.standard_normal((s_kv, d)) / 10).clip(-1, 1).astype(BF16)
    kv[3] = np.nan
    indices = rng.integers(-5, s_kv + 5, (s_q, topk)).astype(np.int32)
    indices[indices == 3] = -1
    indices[0, :: max(1, topk // 9)] = rng.choice([*STRANGE, s_kv, s_kv + 1], len(indices[0, :: max(1, topk // 9)]))
    indices[s_q // 2, : min(128, topk // 2)] = -1
    return q, kv, indices


def extras_for(rng, s_q, h_q, topk):
    length = rng.integers(-3, topk + 9, s_q).astype(np.int32)
    sink = rng.standard_normal(h_q).astype(np.float32)
    sink[: min(4, h_q)] = [np.inf, -np.inf, 1e4, -1e4][: min(4, h_q)]
    return length, sink


def check(rng, s_q, h_q, s_kv, topk, d, extras, **kwargs):
    q, kv, indices = inputs(rng, s_q, h_q, s_kv, topk, d)
    length, sink = extras_for(rng, s_q, h_q, topk) if extras else (None, None)
    got = run(q, kv, indices, length, sink, sm_scale=d**-0.5, **kwargs)
    assert_sparse_close(got, sparse_attention(q, kv, indices, d**-0.5, length, sink))
    return got, (q, kv, indices, length, sink)


# ------------------------------------------------------------------------------------------------ interpreter, CPU
@pytest.mark.parametrize(
    "d, h_q, s_q, topk, extras",
    [
        (512, 64, 3, 128, False),
        (512, 64, 3, 300, True),
        (576, 64, 2, 200, True),
        (512, 1, 3, 1, False),
        (512, 20, 2, 130, True),
        (512, 100, 2, 128, True),
        (576, 128, 2, 129, False),
    ],
)
def test_interpreted(rng, d, h_q, s_q, topk, extras):
    check(rng, s_q, h_q, 60, topk, d, extras)


@pytest.mark.parametrize("path", GOLDEN_FILES)
def test_golden_interpreted(path):
    """Two rows of FlashMLA's own output."""
    z = golden(f"flashmla/{path}")
    rows = slice(0, 2)
    length, sink = z.get("topk_length"), z.get("attn_sink")
    got = run(
        z["q"][rows], z["kv"][:, 0], z["indices"][rows, 0], None if length is None else length[rows], sink,
        sm_scale=float(z["sm_scale"]),
    )  # fmt: skip
    assert_sparse_close(got, [z[name][rows] for name in ("out", "max_logits", "lse")])


def one_hot_rows(n_columns: int):
    """Index rows, and their valid ids, for keys 0..599 with q = 0."""
    rng = np.random.default_rng(0)
    leading = np.full(n_columns, -1)
    leading[-128:-126] = 5, 6
    holes = rng.permutation(600)[:n_columns]
    holes[rng.random(n_columns) < 0.5] = -1
    valid = rng.permutation(600)[: n_columns // 2]
    strange = rng.permutation(np.concatenate([valid, rng.choice([*STRANGE, 600, 601], n_columns - len(valid))]))
    return np.stack([leading, holes, strange, np.full(n_columns, -1)]).astype(np.int32)


def check_one_hot(indices, interpret):
    out, max_logits, lse = run(
        np.zeros((len(indices), 2, 512), BF16), one_hot_kv(600).astype(BF16), indices, interpret=interpret
    )
    for row, o, m, l in zip(indices, out, max_logits, lse):
        valid = row[(row >= 0) & (row < 600)]
        want = one_hot_out(valid) if len(valid) else np.zeros(512, BF16)
        np.testing.assert_allclose(o.astype(np.float32), np.stack([want] * 2).astype(np.float32), rtol=1 / 128)
        np.testing.assert_array_equal(m, 0 if len(valid) else -np.inf)
        np.testing.assert_allclose(l, np.log(len(valid)) if len(valid) else np.inf, rtol=1e-6)


def test_one_hot_interpreted():
    """Every shifted, missing, doubled or leaked index shows in the output."""
    check_one_hot(one_hot_rows(384), INTERPRET)


def test_columns_past_the_length_are_not_read():
    """Ids behind the length, whatever they are, equal -1 padding, bit by bit."""
    rng = np.random.default_rng(1)
    q, kv, indices = inputs(rng, 2, 8, 40, 200)
    length = np.array([0, 131], np.int32)
    behind = np.arange(200) >= length[:, None]
    got = run(q, kv, np.where(behind, 3, indices), length)
    for a, b in zip(got, run(q, kv, np.where(behind, -1, indices), length)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_length", [False, True])
def test_rows_without_keys(with_length, with_sink):
    q, kv = np.ones((1, 4, 512), BF16), np.ones((9, 512), BF16)
    sink = np.array([-np.inf, 0, 5, np.inf], np.float32) if with_sink else None
    indices, length = (0, np.zeros(1, np.int32)) if with_length else (-1, None)
    out, max_logits, lse = run(q, kv, np.full((1, 128), indices, np.int32), length, sink)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(max_logits, -np.inf)
    np.testing.assert_array_equal(lse, np.inf)


def test_large_steps_of_the_maximum():
    """Logits that grow by hundreds from block to block, past the slack of the exp2 reference, and fall back."""
    q, kv, _ = inputs(np.random.default_rng(2), 1, 64, 512, 1)
    kv[3] = 0
    q[..., 0], kv[:, 0] = 1, np.repeat([1, 3, 4, 60, 61, 500, 2, 1], 64)
    indices = np.arange(512, dtype=np.int32)[None]
    for columns in (slice(0, 320), slice(320, 512)):
        got = run(q, kv, indices[:, columns], sm_scale=1.0)
        assert_sparse_close(got, sparse_attention(q, kv, indices[:, columns], 1.0))


def test_race_detection_finds_an_early_arrival(monkeypatch, fresh_caches):
    """Positive control: a buffer that is announced before it is filled."""

    def copy_rows(rows_ref, numbers, first_chunk, buffer, barriers, k, *, keep):
        plgpu.barrier_arrive(barriers.at[k])
        buffer[...] = jnp.zeros(buffer.shape, buffer.dtype)

    monkeypatch.setattr(Interpreted, "copy_rows", staticmethod(copy_rows))
    q, kv, indices = inputs(np.random.default_rng(3), 1, 64, 40, 128)
    args = [jnp.array(x) for x in (q, kv, indices)]
    try:  # jax 0.11 takes a note of the race, 0.12 raises
        jax.block_until_ready(sparse_mla_attention(*args, sm_scale=0.05, interpret=INTERPRET))
        assert get_races().races_found
    except RuntimeError as error:
        assert "RACE DETECTED" in str(error)


@pytest.mark.parametrize("n, parts", [(1, 1), (5, 4), (40, 7), (1000, 132), (4096, 66)])
@pytest.mark.parametrize("most", [1, 640, 8192])
@pytest.mark.parametrize("other", ["one scope", "without lengths", "with lengths"])
def test_shares_are_fair(rng, n, parts, most, other):
    """Every row in one part, and no part more than a row's work above the average, whatever the lengths."""
    columns = [most] if other == "one scope" else [300, most]
    first = {"one scope": [], "without lengths": [None], "with lengths": [rng.integers(0, 301, n)]}[other]
    for length in (rng.integers(-9, most + 99, n), np.zeros(n), np.where(rng.random(n) < 0.03, most, 0)):
        scopes = [*first, length]
        rounds = sum(-(-np.clip(c if x is None else x, 0, c) // 128) for x, c in zip(scopes, columns))
        work = np.maximum(rounds, 1) + 2
        given = [None if x is None else jnp.array(x, jnp.int32) for x in scopes]
        bounds = [Interpreted.share(None, given, columns, 2, part, parts) for part in range(parts)]
        assert bounds[0][0] == 0 and bounds[-1][1] == n
        assert all(end == first for (_, end), (first, _) in itertools.pairwise(bounds))
        assert max(work[first:end].sum() for first, end in bounds) <= work.sum() / parts + work.max()


# ---------------------------------------------------------------------------------------------- dispatch, lowering
def shapes(s_q=4096, h_q=64, d=512, topk=640, s_kv=32_768, extras=True, dtype=jnp.bfloat16):
    sds = jax.ShapeDtypeStruct
    more = (sds((s_q,), jnp.int32), sds((h_q,), jnp.float32)) if extras else ()
    return sds((s_q, h_q, d), dtype), sds((s_kv, d), dtype), sds((s_q, topk), jnp.int32), *more


def attention(*args):
    return sparse_mla_attention(*args, sm_scale=0.04, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    "kwargs, d_v, reason",
    [
        (dict(dtype=jnp.float32), 512, "bfloat16"),
        (dict(d=448), 448, "d_qk"),
        (dict(), 256, "d_v"),
        (dict(h_q=129), 512, "128 heads"),
    ],
)
def test_unsupported(kwargs, d_v, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(
            lambda *a: sparse_mla_attention(*a, sm_scale=1.0, d_v=d_v, implementation="mosaic_gpu"), *shapes(**kwargs)
        )


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("h_q, topk", [(64, 640), (100, 200)])
def test_never_falls_back(h_q, topk, x64):
    """The text lowered for a GPU holds the kernel by its name, one launch, no copy of q or of the indices, no dot."""
    with jax.enable_x64(x64):
        text = jax.jit(attention).trace(*shapes(h_q=h_q, topk=topk)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert f"{mosaic_gpu.KERNEL_NAME}_mosaic_gpu" in text
    for op in ("dot_general", "gather", "pad", "concatenate"):
        assert f"stablehlo.{op}" not in text


def test_a_model_lowers_it_once():
    """Layers with the same shapes share one lowered kernel: it is under a jit of its own."""

    def layers(q, *args):
        for _ in range(3):
            q = attention(q, *args).out
        return q

    text = jax.jit(layers).trace(*shapes(s_q=4)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1 and text.count("call @sparse_mla_attention") == 3


AOT_SHAPES = [(512, 64, 640), (512, 128, 1152), (576, 128, 2048), (512, 8, 512), (576, 100, 200)]
MAX_SPILL_BYTES = 16  # a few per launch or per round, measured without effect; more means that an accumulator went out
SHARED_MEMORY = 232_448  # bytes that a block may have on an H200


@pytest.mark.aot
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize("d, h_q, topk", AOT_SHAPES)
def test_compiles_for_hopper(d, h_q, topk, extras, capfd, monkeypatch):
    """Few spilled bytes and no wgmma that ptxas serialises."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_for_h200(attention, *shapes(d=d, h_q=h_q, topk=topk, extras=extras))
    assert f"{mosaic_gpu.KERNEL_NAME}_mosaic_gpu" in compiled.as_text()
    assert_few_spills("".join(capfd.readouterr()), MAX_SPILL_BYTES)


def test_what_few_spills_are():
    fine = "0 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n (C7519) warpgroup.arrive is injected"
    assert_few_spills(fine, 4)
    serialised = "(C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient"
    for log, most in ((fine, 3), (fine + serialised, 4), ("", 4)):
        with pytest.raises(AssertionError):
            assert_few_spills(log, most)


@pytest.mark.aot
def test_compiles_with_its_profiler(monkeypatch, tmp_path):
    """The trace fits into what shared memory is left."""
    traces = []
    monkeypatch.setattr(jax.debug, "callback", lambda *args: traces.append(args))  # needs a GPU
    compile_for_h200(attention, *shapes())
    assert not traces
    with profile_kernel.profiler(tmp_path):
        compile_for_h200(attention, *shapes())
    assert traces


@pytest.mark.aot
def test_compiles_sharded_and_in_a_cond():
    mesh = h200_mesh((2,), ("cp",))
    specs = P("cp"), P(), P("cp"), P("cp"), P(), P()

    def local(*args):
        *args, pick = args

        def attend(implementation):
            return lambda: sparse_mla_attention(*args, sm_scale=0.04, implementation=implementation)

        return lax.cond(pick, attend("mosaic_gpu"), attend("xla"))

    args = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip((*shapes(s_q=64), jax.ShapeDtypeStruct((), jnp.bool)), specs)
    ]
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("cp"))
    assert "mosaic_gpu" in compile_for_h200(fn, *args).as_text()


# ---------------------------------------------------------------------------------------------------------- on a GPU
# The shapes of FlashMLA's own test (tests/test_flash_mla_sparse_prefill.py): s_kv, topk.
FLASHMLA_PAIRS = [
    (128, 128), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384), (256, 256),
    (512, 512), (32, 2048), (64, 8192),
]  # fmt: skip


def check_on_gpu(rng, s_q, h_q, s_kv, topk, d, extras):
    """Against the float64 formula; two runs are equal bit by bit."""
    q, kv, indices = inputs(rng, s_q, h_q, s_kv, topk, d)
    length, sink = extras_for(rng, s_q, h_q, topk) if extras else (None, None)
    args = [None if x is None else jnp.array(x) for x in (q, kv, indices, length, sink)]
    got = sparse_mla_attention(*args, sm_scale=d**-0.5, implementation="mosaic_gpu")
    again = sparse_mla_attention(*args, sm_scale=d**-0.5, implementation="mosaic_gpu")
    for a, b in zip(got, again):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert_sparse_close(got, sparse_attention(q, kv, indices, d**-0.5, length, sink))


@pytest.mark.gpu
@pytest.mark.parametrize("s_q, s_kv, topk", [(1234, 4321, 4096), (4096, 2048, 2048)])
def test_all_invalid(s_q, s_kv, topk):
    q, kv = np.ones((s_q, 64, 512), BF16), np.full((s_kv, 512), np.nan, BF16)
    out, max_logits, lse = run(q, kv, np.full((s_q, topk), -1, np.int32), interpret=False)
    assert not out.any() and (max_logits == -np.inf).all() and (lse == np.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("path", GOLDEN_FILES)
def test_golden(path):
    z = golden(f"flashmla/{path}")
    args = z["q"], z["kv"][:, 0], z["indices"][:, 0], z.get("topk_length"), z.get("attn_sink")
    got = run(*args, sm_scale=float(z["sm_scale"]), interpret=False)
    assert_sparse_close(got, (z["out"], z["max_logits"], z["lse"]))


@pytest.mark.gpu
@pytest.mark.parametrize("s_q", [1, 63, 64, 65, 80, 129, 1000])
def test_columns_past_the_length_on_gpu(s_q):
    rng = np.random.default_rng(s_q)
    q, kv, indices = inputs(rng, s_q, 64, 700, 640)
    length = rng.integers(0, 641, s_q).astype(np.int32)
    behind = np.arange(640) >= length[:, None]
    want = run(q, kv, np.where(behind, -1, indices), length, interpret=False)
    for other in (3, 2147480000):
        for a, b in zip(run(q, kv, np.where(behind, other, indices), length, interpret=False), want):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("h_q", [1, 2, 5, 8, 16, 20, 32, 63, 65, 100, 127])
def test_any_number_of_heads(h_q):
    """Equals the slice of a 128-head run, bit by bit."""
    rng = np.random.default_rng(4)
    q, kv, indices = inputs(rng, 70, 128, 500, 300)
    _, sink = extras_for(rng, 70, 128, 300)
    whole = run(q, kv, indices, None, sink, interpret=False)
    for a, b in zip(run(q[:, :h_q], kv, indices, None, sink[:h_q], interpret=False), whole):
        np.testing.assert_array_equal(a, b[:, :h_q])


@pytest.mark.gpu
@pytest.mark.parametrize("s_q", [1, 131, 385, 5000])
def test_unfair_lengths_on_gpu(s_q):
    """Lengths that are 0 nearly everywhere, then nowhere: every query is answered, by one block, the same way."""
    rng = np.random.default_rng(s_q)
    q, kv, indices = inputs(rng, s_q, 8, 700, 640)
    for length in (np.where(rng.random(s_q) < 0.03, 640, 0), np.sort(rng.integers(0, 641, s_q))):
        behind = np.arange(640) >= length[:, None]
        want = run(q, kv, np.where(behind, -1, indices), interpret=False)
        for a, b in zip(run(q, kv, indices, length.astype(np.int32), interpret=False), want):
            np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
def test_one_hot_on_gpu():
    check_one_hot(one_hot_rows(512), False)


@pytest.mark.gpu
@pytest.mark.slow
def test_past_32_bits():
    """A workspace of 4.3 million rows, and 131,072 queries of 128 heads: byte offsets past 2^31 and 2^32."""
    s_kv = 4_300_000
    kv = jnp.zeros((s_kv, 512), jnp.bfloat16).at[s_kv - 600 :].set(jnp.array(one_hot_kv(600), jnp.bfloat16))
    ids = np.arange(s_kv - 128, s_kv, dtype=np.int32)
    out, _, lse = sparse_mla_attention(
        jnp.zeros((131_072, 128, 512), jnp.bfloat16), kv, jnp.broadcast_to(jnp.array(ids), (131_072, 128)), sm_scale=0.04,
        implementation="mosaic_gpu",
    )  # fmt: skip
    want = one_hot_out(ids - (s_kv - 600))
    for t, h in ((0, 0), (70_000, 5), (131_071, 127)):
        np.testing.assert_array_equal(np.asarray(out[t, h]), want)
    np.testing.assert_allclose(np.asarray(lse[-1]), np.log(128), rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("s_kv, topk", FLASHMLA_PAIRS)
@pytest.mark.parametrize("s_q", [1, 62, 213])
@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("d", [512, 576])
def test_flashmla_shapes(rng, d, h_q, s_q, s_kv, topk):
    for extras in (False, True):
        check_on_gpu(rng, s_q, h_q, s_kv, topk, d, extras)
