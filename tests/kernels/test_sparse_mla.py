"""Sparse MLA attention, plain jnp: FlashMLA's golden data, exact oracles, hard cases, gradients, memory."""

import itertools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import sparse_mla_attention
from tests.helpers.oracles import (
    BF16,
    GOLDEN,
    assert_sparse_close,
    golden,
    one_hot_kv,
    one_hot_out,
    sparse_attention,
)


def run(q, kv, indices, topk_length=None, attn_sink=None, *, sm_scale=0.05, **kwargs):
    out = sparse_mla_attention(q, kv, indices, topk_length, attn_sink, sm_scale=sm_scale, **kwargs)
    return [np.asarray(x) for x in out]


def inputs(rng, s_q, h_q, s_kv, topk, d=512, dtype=BF16):
    q = rng.standard_normal((s_q, h_q, d)).astype(dtype)
    kv = rng.standard_normal((s_kv, d)).astype(dtype)
    return q, kv, rng.integers(0, s_kv, (s_q, topk)).astype(np.int32)


@pytest.mark.parametrize("path", sorted(p.name for p in (GOLDEN / "flashmla").glob("p*.npz")))
def test_flashmla(path):
    z = golden(f"flashmla/{path}")
    args = z["q"], z["kv"][:, 0], z["indices"][:, 0], z.get("topk_length"), z.get("attn_sink")
    got = run(*args, sm_scale=float(z["sm_scale"]))
    assert_sparse_close(got, (z["out"], z["max_logits"], z["lse"]))
    q, kv, indices, length, sink = args
    rows = slice(0, 3)
    want = sparse_attention(
        q[rows], kv, indices[rows], float(z["sm_scale"]), None if length is None else length[rows], sink
    )
    assert_sparse_close([x[rows] for x in got], want)


@pytest.mark.parametrize("d, h_q, topk", [(512, 3, 130), (576, 64, 40), (512, 1, 1)])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("extras", [False, True])
def test_matches_the_formula(rng, d, h_q, topk, dtype, extras):
    q, kv, indices = inputs(rng, 5, h_q, 90, topk, d, dtype)
    indices[0, ::3] = -1
    length = rng.integers(0, topk + 2, 5).astype(np.int32) if extras else None
    sink = rng.standard_normal(h_q).astype(np.float32) if extras else None
    got = run(q, kv, indices, length, sink, sm_scale=d**-0.5)
    assert got[0].dtype == dtype
    want = sparse_attention(q, kv, indices, d**-0.5, length, sink)
    assert_sparse_close(got, want)
    if dtype == np.float32:
        np.testing.assert_allclose(got[0], want[0], atol=2e-6)


@pytest.mark.parametrize("n", [128, 256, 512])
def test_one_hot(rng, n):
    """Every shifted, missing, doubled or leaked index shows in the output, exactly."""
    ids = rng.permutation(600)[:n].astype(np.int32)
    out, max_logits, lse = run(np.zeros((1, 2, 512), BF16), one_hot_kv(600).astype(BF16), ids[None])
    np.testing.assert_array_equal(out[0, 0], one_hot_out(ids))
    np.testing.assert_array_equal(max_logits, 0)
    np.testing.assert_allclose(lse, np.log(n), rtol=1e-6)


def test_lse_is_the_natural_log():
    """Hard case 10: n = 100 keys of weight one."""
    out = run(np.zeros((1, 1, 512), BF16), np.ones((100, 512), BF16), np.arange(100, dtype=np.int32)[None])
    np.testing.assert_allclose(out[2], 4.605170, atol=1e-6)


@pytest.mark.parametrize("sink, share", [(0.0, 127 / 128), (-np.inf, 1), (np.inf, 0), (1e4, 0), (-1e4, 1)])
def test_sink_joins_the_denominator_only(sink, share):
    kv, ids = np.ones((127, 512), BF16), np.arange(127, dtype=np.int32)[None]
    out, max_logits, lse = run(np.zeros((1, 2, 512), BF16), kv, ids, attn_sink=np.full(2, sink, np.float32))
    np.testing.assert_array_equal(out, np.full(out.shape, share).astype(BF16))
    np.testing.assert_allclose(lse, np.log(127), rtol=1e-6)
    np.testing.assert_array_equal(max_logits, 0)


@pytest.mark.parametrize("s_q", [1, 63, 64, 65, 80, 129, 1000])
def test_columns_past_the_length_are_not_there(rng, s_q):
    """Hard case 3: ids behind topk_length point at a NaN row or are huge; bit-equal to -1 padding."""
    q, kv, indices = inputs(rng, s_q, 1, 200, 640)
    kv[7] = np.nan
    indices = np.where(indices == 7, 8, indices)
    length = rng.integers(0, 641, s_q).astype(np.int32)
    behind = np.arange(640) >= length[:, None]
    padded = run(q, kv, np.where(behind, -1, indices))
    for strange in (7, 2147480000):
        got = run(q, kv, np.where(behind, strange, indices), length)
        for a, b in zip(got, padded):
            np.testing.assert_array_equal(a, b)


def test_leading_empty_blocks():
    """Hard case 4: [-1] * 128 + [5, 6] + ..., then two whole blocks of columns invalid, then valid/invalid/valid."""
    kv = one_hot_kv(20).astype(BF16)
    rows = np.full((3, 1152), -1, np.int32)
    rows[0, 128:130] = 5, 6
    rows[1, 640:642] = 5, 6
    rows[2, 0], rows[2, 1100] = 5, 6
    out, max_logits, lse = run(np.zeros((3, 4, 512), BF16), kv, rows)
    np.testing.assert_array_equal(out, np.broadcast_to(one_hot_out([5, 6]), out.shape))
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)
    np.testing.assert_array_equal(max_logits, 0)


def test_strange_ids_are_no_keys(rng):
    """Hard case 4: invalid values of all kinds at random columns, first and last KV rows NaN."""
    s_kv = 64
    kv = one_hot_kv(s_kv)
    kv[0] = kv[-1] = np.nan
    row = rng.choice([-(2**31), -123456, -1, s_kv, s_kv + 1, 2147480000, 2**31 - 1], 256).astype(np.int32)
    row[[17, 200]] = 5, 6
    out, _, lse = run(np.zeros((1, 2, 512), BF16), kv.astype(BF16), row[None])
    np.testing.assert_array_equal(out, np.broadcast_to(one_hot_out([5, 6]), out.shape))
    np.testing.assert_allclose(lse, np.log(2), rtol=1e-6)


@pytest.mark.parametrize("sink", [None, -np.inf, 0.0, 5.0, np.inf])
@pytest.mark.parametrize("length", [None, 0])
def test_empty_rows(sink, length):
    """Hard case 5, also under jax_debug_nans, forward and backward."""
    q, kv = np.ones((2, 3, 512), BF16), np.ones((9, 512), BF16)
    ids = np.full((2, 64), -1 if length is None else 3, np.int32)
    kwargs = dict(
        topk_length=None if length is None else np.zeros(2, np.int32),
        attn_sink=None if sink is None else np.full(3, sink, np.float32),
    )
    with jax.debug_nans(True):
        out, max_logits, lse = run(q, kv, ids, **kwargs)
        grad = jax.grad(lambda q: sparse_mla_attention(q, kv, ids, sm_scale=1.0, **kwargs).out.sum().astype(float))
        assert (grad(jnp.asarray(q)) == 0).all()
    assert (out == 0).all() and (lse == np.inf).all() and (max_logits == -np.inf).all()


def test_repeated_ids_count_repeatedly():
    kv = one_hot_kv(10).astype(BF16)
    ids = np.array([[3, 3, 3, 4] + [-1] * 60], np.int32)
    out, _, lse = run(np.zeros((1, 1, 512), BF16), kv, ids)
    np.testing.assert_array_equal(out[0, 0], one_hot_out([3, 3, 3, 4]))
    np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


@pytest.mark.parametrize("s_q, h_q, s_kv, topk", [(0, 4, 9, 64), (3, 0, 9, 64), (3, 4, 0, 64), (3, 4, 9, 0)])
def test_empty_shapes(s_q, h_q, s_kv, topk):
    q, kv, ids = np.zeros((s_q, h_q, 512), BF16), np.zeros((s_kv, 512), BF16), np.zeros((s_q, topk), np.int32)
    out, max_logits, lse = run(q, kv, ids, attn_sink=np.zeros(h_q, np.float32))
    assert out.shape == (s_q, h_q, 512) and max_logits.shape == lse.shape == (s_q, h_q)
    assert (out == 0).all() and (lse == np.inf).all() and (max_logits == -np.inf).all()
    grads = jax.grad(lambda q, kv: sparse_mla_attention(q, kv, ids, sm_scale=1.0).out.sum().astype(float), (0, 1))(
        q, kv
    )
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("s_q", [65536, 70000])
def test_many_rows(s_q):
    kv = one_hot_kv(4).astype(np.float32)
    ids = (np.arange(s_q, dtype=np.int32) % 4)[:, None]
    out, _, _ = run(np.zeros((s_q, 1, 512), np.float32), kv, ids, d_v=4)
    np.testing.assert_array_equal(out[:, 0], np.eye(4)[ids[:, 0]])


@pytest.mark.parametrize("h_q", [2, 8, 65])
def test_heads_are_independent(rng, h_q):
    """Any head count gives the slice of a 128-head run."""
    q, kv, ids = inputs(rng, 3, 128, 50, 64)
    sink = rng.standard_normal(128).astype(np.float32)
    for a, b in zip(run(q[:, :h_q], kv, ids, None, sink[:h_q]), run(q, kv, ids, None, sink)):
        np.testing.assert_allclose(a.astype(np.float32), b[:, :h_q].astype(np.float32), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("extras", [False, True])
def test_gradients(rng, extras):
    """Reverse mode against finite differences, over several blocks of rows, for every output."""
    s_q, topk, s_kv, d = 300, 96, 40, 576  # 2^23 / (96 * 576) = 151 rows a block: two blocks, the last one overlaps
    q, kv, ids = inputs(rng, s_q, 2, s_kv, topk, d, np.float32)
    q, kv = q[:, :, :d] / 4, kv / 4
    ids[rng.random(ids.shape) < 0.3] = -1
    length = jnp.asarray(rng.integers(1, topk, s_q), jnp.int32) if extras else None
    sink = jnp.asarray(rng.standard_normal(2), jnp.float32) if extras else None
    weight = jnp.asarray(rng.standard_normal((s_q, 2, 512)), jnp.float32)

    def loss(q, kv, sink):
        out, _, lse = sparse_mla_attention(q, kv, jnp.asarray(ids), length, sink, sm_scale=0.3)
        return (out * weight).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    args = (jnp.asarray(q), jnp.asarray(kv), sink) if extras else (jnp.asarray(q), jnp.asarray(kv))
    f = loss if extras else lambda q, kv: loss(q, kv, None)
    check_grads(jax.jit(f), args, order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


def test_gradient_blocks_do_not_count_twice(rng):
    """The overlap of the last block adds nothing: gradients of 152 rows = those of the first 151 + the last."""
    q, kv, ids = inputs(rng, 152, 2, 40, 96, 576, np.float32)
    sink = jnp.zeros(2)

    def grads(rows):
        f = lambda q, kv, sink: sparse_mla_attention(q, kv, ids[rows], None, sink, sm_scale=0.1).out.sum()  # noqa: E731
        return jax.grad(f, (0, 1, 2))(jnp.asarray(q[rows]), jnp.asarray(kv), sink)

    whole, first, last = grads(slice(0, 152)), grads(slice(0, 100)), grads(slice(100, 152))
    np.testing.assert_allclose(whole[0], np.concatenate([first[0], last[0]]), atol=1e-5)
    for i in (1, 2):
        np.testing.assert_allclose(whole[i], first[i] + last[i], rtol=1e-4, atol=1e-4)


def test_x64_does_not_widen(rng):
    q, kv, ids = inputs(rng, 2, 2, 20, 64)
    want = run(q, kv, ids)
    with jax.enable_x64(True):
        got = run(q, kv, ids)
    for a, b in zip(got, want):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_deterministic(rng):
    q, kv, ids = inputs(rng, 40, 4, 100, 128)
    for a, b in zip(run(q, kv, ids), run(q, kv, ids)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("topk", [1, 8])
def test_memory_is_bounded_for_a_small_topk(topk):
    """Hard case 8's shape: 32,768 rows of 128 heads. Beside its results the compiled program takes little memory."""
    shapes = (32768, 128, 512), (100, 512), (32768, topk)
    args = [jax.ShapeDtypeStruct(s, jnp.int32 if i == 2 else jnp.bfloat16) for i, s in enumerate(shapes)]
    run = jax.jit(lambda q, kv, ids: sparse_mla_attention(q, kv, ids, sm_scale=0.05))
    assert run.lower(*args).compile().memory_analysis().temp_size_in_bytes < 2**29


PEAK = """
import json, re, jax, jax.numpy as jnp
from pallas_kernels import sparse_mla_attention
s_q, h_q, topk = 10600, 64, 1152
q = jnp.ones((s_q, h_q, 512), jnp.bfloat16)
kv = jnp.ones((3000, 512), jnp.bfloat16)
ids = jax.lax.broadcasted_iota(jnp.int32, (s_q, topk), 1)
sink = jnp.zeros(h_q)
f = lambda q, kv, sink: sparse_mla_attention(q, kv, ids, None, sink, sm_scale=0.05).out
if {gradient}:
    def loss(q, kv, sink):
        out = f(q, kv, sink)
        return (out[:, :, 0].astype(jnp.float32)).sum()
    result = jax.jit(jax.grad(loss, (0, 1, 2)))(q, kv, sink)
else:
    result = jax.jit(f)(q, kv, sink)
jax.block_until_ready(result)
# Not ru_maxrss, which begins at the size of the process that started this one.
kib = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]
print(json.dumps(int(kib) / 2**20))
"""


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [False, True])
def test_peak_memory(gradient):
    """10,600 rows, h_q 64, topk 1152, bf16: below 4 GiB resident, the gradient too."""
    code = PEAK.replace("{gradient}", str(gradient))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900, check=True)
    assert json.loads(done.stdout) < 4.0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(q=jnp.zeros((3, 512))), r"`q` must have shape \[s_q, h_q, d_qk\], got \(3, 512\)"),
        (dict(q=jnp.zeros((3, 4, 512), jnp.float16)), r"`q` must have dtype bfloat16 or float32, got float16"),
        (dict(kv=jnp.zeros((9, 576))), r"`kv` must have shape \[s_kv, d_qk=512\], got \(9, 576\)"),
        (dict(kv=jnp.zeros((9, 512), jnp.bfloat16)), r"`kv` must have dtype float32, got bfloat16"),
        (dict(indices=jnp.zeros((4, 64), jnp.int32)), r"`indices` must have shape \[s_q=3, topk\], got \(4, 64\)"),
        (dict(indices=jnp.zeros((3, 64))), r"`indices` must have dtype int32, got float32"),
        (dict(topk_length=jnp.zeros((3, 1), jnp.int32)), r"`topk_length` must have shape \[s_q=3\]"),
        (dict(attn_sink=jnp.zeros(5)), r"`attn_sink` must have shape \[h_q=4\], got \(5,\)"),
        (dict(attn_sink=[0.0] * 4), r"`attn_sink` must be an array, got list"),
        (dict(d_v=1024), r"`d_v` must be in 1..d_qk=512, got 1024"),
        (dict(d_v=None), r"`d_v` must be an int >= 1, got None"),
        (dict(sm_scale=None), r"`sm_scale` must be a finite number known when the function is traced, got None"),
        (dict(sm_scale=jnp.float32(1)), r"`sm_scale` must be a finite number known when the function is traced"),
        (dict(implementation="triton"), r"`implementation` of sparse_mla_attention must be None, 'xla'"),
    ],
)
def test_bad_arguments(change, message):
    kwargs = dict(q=jnp.zeros((3, 4, 512)), kv=jnp.zeros((9, 512)), indices=jnp.zeros((3, 64), jnp.int32), sm_scale=1.0)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: sparse_mla_attention(**(kwargs | change)))


def test_shapes_need_no_gpu():
    shapes = [jax.ShapeDtypeStruct((7, 64, 576), jnp.bfloat16), jax.ShapeDtypeStruct((9, 576), jnp.bfloat16)]
    got = jax.eval_shape(
        lambda q, kv, ids: sparse_mla_attention(q, kv, ids, sm_scale=1.0),
        *shapes,
        jax.ShapeDtypeStruct((7, 128), jnp.int32),
    )
    assert [(x.shape, x.dtype) for x in got] == [
        ((7, 64, 512), jnp.bfloat16),
        *itertools.repeat(((7, 64), jnp.float32), 2),
    ]
