"""merge_attention and apply_attn_sink."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import apply_attn_sink, merge_attention, sparse_mla_attention
from pallas_kernels.attention_math import merge_parts
from tests.helpers.aot import compile_for_h200


def test_30_and_70_keys_are_100(rng):
    """Hard case 10."""
    q = jnp.asarray(rng.standard_normal((2, 3, 512)), jnp.float32)
    kv = jnp.asarray(rng.standard_normal((100, 512)), jnp.float32)
    ids = jnp.broadcast_to(jnp.arange(100, dtype=jnp.int32), (2, 100))
    attend = lambda ids: sparse_mla_attention(q, kv, ids, sm_scale=0.05)  # noqa: E731
    whole, a, b = attend(ids), attend(ids[:, :30]), attend(ids[:, 30:])
    out, lse = merge_attention(a.out, a.lse, b.out, b.lse)
    np.testing.assert_allclose(out, whole.out, atol=1e-6)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-6)


def test_many_parts(rng):
    """As one softmax over all keys, some parts without a key."""
    logits = rng.standard_normal((32, 3, 2, 4)) * 20
    logits[rng.random((32, 3, 2)) < 0.3] = -np.inf
    logits[:, 2, 1] = -np.inf
    values = rng.standard_normal((32, 3, 2, 4, 8))
    top = np.maximum(logits.max((0, 3)), -1e4)
    weights = np.exp(logits - top[..., None])
    sums, products = weights.sum(-1), np.einsum("pijk,pijkd->pijd", weights, values)
    with np.errstate(divide="ignore", invalid="ignore"):
        outs = jnp.asarray(products / sums[..., None], jnp.float32)  # NaN in parts without a key
        lses = jnp.asarray(np.where(sums > 0, np.log(sums) + top, np.inf), jnp.float32)
        want = np.nan_to_num(products.sum(0) / sums.sum(0)[..., None])
    got, lse = merge_parts(outs, lses)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(lse, np.where(sums.sum(0) > 0, np.log(sums.sum(0) + 1e-99) + top, np.inf), rtol=1e-6)
    assert lse[2, 1] == np.inf and np.isfinite(np.delete(np.ravel(lse), 5)).all()


@pytest.mark.aot
def test_kernels_of_the_merge():
    """Reductions over an axis of parts would make seven."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 1, 64, 512), (32, 1, 64))]
    text = compile_for_h200(merge_parts, *shapes).as_text()
    assert text[text.index("ENTRY") :].count(" fusion(") <= 3, text


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_an_empty_part_changes_nothing(rng, dtype):
    out = jnp.asarray(rng.standard_normal((4, 2, 8)), dtype)
    lse = jnp.asarray(rng.standard_normal((4, 2)), jnp.float32) * 50
    empty = jnp.zeros_like(out), jnp.full_like(lse, jnp.inf)
    poison = jnp.full_like(out, jnp.nan), empty[1]
    np.testing.assert_array_equal(merge_attention(out, lse, *poison)[0], out)
    assert (apply_attn_sink(*poison, jnp.zeros(2)) == 0).all()
    with jax.debug_nans(True):
        for got in (merge_attention(out, lse, *empty), merge_attention(*empty, out, lse)):
            np.testing.assert_array_equal(got[0], out)
            np.testing.assert_array_equal(got[1], lse)
        both = merge_attention(*empty, *empty)
    assert (both[0] == 0).all() and (both[1] == jnp.inf).all() and both[0].dtype == dtype


def test_far_apart_parts(rng):
    out = jnp.ones((1, 1, 4)), -jnp.ones((1, 1, 4))
    got, lse = merge_attention(out[0], jnp.full((1, 1), 500.0), out[1], jnp.full((1, 1), -500.0))
    assert (got == 1).all() and lse[0, 0] == 500


def test_gradient_of_the_merge_is_finite():
    f = lambda a, b: merge_attention(jnp.ones((1, 2)), a, jnp.zeros((1, 2)), b)[0].sum()  # noqa: E731
    with jax.debug_nans(True):
        for a, b in ((0.3, -0.2), (np.inf, 1.0), (np.inf, np.inf)):
            assert np.isfinite(jax.grad(f, (0, 1))(jnp.array([a]), jnp.array([b]))).all()


def test_bad_shapes():
    out, lse = jnp.zeros((3, 2, 8)), jnp.zeros((3, 2))
    for call, message in [
        (lambda: merge_attention(out, lse, out, lse[:2]), r"`lse_b` must have shape \[dim0=3, dim1=2\], got \(2, 2\)"),
        (
            lambda: merge_attention(out, lse, out.astype(jnp.bfloat16), lse),
            r"`out_b` must have dtype float32, got bfloat16",
        ),
        (lambda: merge_attention([1.0], lse, out, lse), r"`out_a` must be an array, got list"),
        (lambda: merge_attention(out, lse.astype(jnp.bfloat16), out, lse), r"`lse_a` must have dtype float32"),
        (lambda: apply_attn_sink(out, lse, jnp.zeros(3)), r"`attn_sink` must have shape \[h_q=2\], got \(3,\)"),
        (lambda: apply_attn_sink(out.astype(int), lse, jnp.zeros(2)), r"`out` must have dtype bfloat16 or float32"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
