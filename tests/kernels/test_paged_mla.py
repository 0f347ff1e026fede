"""Paged MLA attention, plain jnp: FlashMLA's golden data, agreement with gather + sparse attention, hard cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from pallas_kernels import (
    KVLayout,
    apply_attn_sink,
    gather_dequant,
    merge_attention,
    paged_mla_attention,
    quantize_pages,
    sparse_mla_attention,
)
from tests.helpers.oracles import BF16, GOLDEN, assert_paged_close, attention, golden, read_row


def golden_arguments(z):
    layout = {584: KVLayout.V4, 656: KVLayout.V32}[z["meta"]["bytes_per_token"]]
    kwargs = dict(
        q=z["q"][:, 0],
        pages=z["k_cache_raw"],
        indices=z["indices"][:, 0],
        topk_length=z.get("topk_length"),
        attn_sink=z.get("attn_sink"),
        layout=layout,
        page_size=int(z["page"]),
    )
    if "extra_k_cache_raw" in z:
        kwargs |= dict(
            extra_pages=z["extra_k_cache_raw"],
            extra_indices=z["extra_indices"][:, 0],
            extra_topk_length=z.get("extra_topk_length"),
            extra_layout=layout,
            extra_page_size=int(z["extra_page"]),
        )
    return {k: jnp.asarray(v) if isinstance(v, np.ndarray) else v for k, v in kwargs.items()}


@pytest.mark.parametrize("path", sorted(p.name for p in (GOLDEN / "flashmla").glob("d*.npz")))
def test_flashmla(path):
    z = golden(f"flashmla/{path}")
    kwargs = golden_arguments(z)
    got = paged_mla_attention(**kwargs, sm_scale=float(z["sm_scale"]))
    assert_paged_close(got, (z["out"][:, 0], z["lse"][..., 0]))

    def keys(t, pages, indices, length, page_size):
        n = len(indices[t]) if length is None else int(length[t])
        slots = [s for s in np.asarray(indices[t][:n]) if 0 <= s < len(pages) * page_size]
        name = kwargs["layout"].name
        return [read_row(np.asarray(pages[s // page_size]), s % page_size, page_size, name) for s in slots]

    for t in range(len(z["q"])):
        selected = keys(t, *(kwargs[k] for k in ("pages", "indices", "topk_length", "page_size")))
        if "extra_pages" in kwargs:
            names = ("extra_pages", "extra_indices", "extra_topk_length", "extra_page_size")
            selected += keys(t, *(kwargs[k] for k in names))
        out, _, lse = attention(z["q"][t, 0], selected, float(z["sm_scale"]), z.get("attn_sink"))
        assert_paged_close((got.out[t], got.lse[t]), (out, lse))


def scene(rng, b=6, h=3, dtype=BF16, layout=KVLayout.V4, extra_layout=KVLayout.V4):
    pages = quantize_pages(rng.standard_normal((5, 16, layout.d)).astype(np.float32), layout=layout, page_size=16)
    extra = quantize_pages(
        rng.standard_normal((9, 2, extra_layout.d)).astype(np.float32), layout=extra_layout, page_size=2
    )
    i32 = lambda *shape, low, high: jnp.asarray(rng.integers(low, high, shape), jnp.int32)  # noqa: E731
    return dict(
        q=jnp.asarray(rng.standard_normal((b, h, layout.d)).astype(dtype)), pages=pages,
        indices=i32(b, 40, low=-2, high=82), topk_length=i32(b, low=-1, high=43),
        attn_sink=jnp.asarray(rng.standard_normal(h), jnp.float32), extra_pages=extra,
        extra_indices=i32(b, 20, low=-2, high=20), extra_topk_length=i32(b, low=-1, high=23), layout=layout,
        page_size=16, extra_layout=extra_layout, extra_page_size=2, sm_scale=0.07,
    )  # fmt: skip


@pytest.mark.parametrize("layout", [KVLayout.V4, KVLayout.BF16, KVLayout.F32], ids=repr)
def test_is_gather_plus_sparse_attention(rng, layout):
    """One softmax over both scopes = sparse attention over the gathered rows of both pools."""
    s = scene(rng, dtype=np.float32, layout=layout, extra_layout=KVLayout.V4)
    rows = [
        gather_dequant(s["pages"], jnp.arange(80), layout=layout, page_size=16).astype(jnp.float32),
        gather_dequant(s["extra_pages"], jnp.arange(18), layout=KVLayout.V4, page_size=2).astype(jnp.float32),
    ]
    ids = []
    for name, size, base in (("", 80, 0), ("extra_", 18, 80)):
        idx, length = s[name + "indices"], s[name + "topk_length"]
        ok = (idx >= 0) & (idx < size) & (jnp.arange(idx.shape[1]) < length[:, None])
        ids.append(jnp.where(ok, idx + base, -1))
    want = sparse_mla_attention(
        s["q"], jnp.concatenate(rows), jnp.concatenate(ids, 1), None, s["attn_sink"], sm_scale=s["sm_scale"]
    )
    got = paged_mla_attention(**s)
    assert_paged_close(got, (want.out, want.lse))
    np.testing.assert_allclose(got.out, want.out, atol=1e-6)


def test_merge_of_scopes(rng):
    """The two scopes apart, merged by lse, then the sink: the same as one call."""
    s = scene(rng, dtype=np.float32)
    both = paged_mla_attention(**s)
    shared = dict(sm_scale=s["sm_scale"])
    a = paged_mla_attention(
        s["q"], s["pages"], s["indices"], s["topk_length"], layout=KVLayout.V4, page_size=16, **shared
    )
    b = paged_mla_attention(
        s["q"], s["extra_pages"], s["extra_indices"], s["extra_topk_length"], layout=KVLayout.V4, page_size=2, **shared
    )
    out, lse = merge_attention(*a, *b)
    np.testing.assert_allclose(lse, both.lse, rtol=1e-6)
    np.testing.assert_allclose(apply_attn_sink(out, lse, s["attn_sink"]), both.out, atol=5e-6)


def test_poison_changes_nothing(rng):
    """0xFF in every byte that must not be read: unused slots, slack, scale pads, columns behind the lengths."""
    s = scene(rng)
    used = {"": set(), "extra_": set()}
    for name, keep in used.items():
        for row, n in zip(np.asarray(s[name + "indices"]), np.asarray(s[name + "topk_length"])):
            keep |= set(row[: max(n, 0)])
    poisoned = dict(s)
    for name, page_size in (("", 16), ("extra_", 2)):
        pages = np.full_like(s[name + "pages"], 0xFF)
        for slot in used[name]:
            if 0 <= slot < pages.shape[0] * page_size:
                page, t = divmod(slot, page_size)
                scale = 576 * page_size + 8 * t
                for at in (slice(t * 576, t * 576 + 576), slice(scale, scale + 7)):
                    pages[page, at] = s[name + "pages"][page, at]
        poisoned[name + "pages"] = jnp.asarray(pages)
        behind = jnp.arange(s[name + "indices"].shape[1]) >= s[name + "topk_length"][:, None]
        unused = next(x for x in range(pages.shape[0] * page_size) if x not in used[name])
        poisoned[name + "indices"] = jnp.where(behind, unused, s[name + "indices"])
    for a, b in zip(paged_mla_attention(**poisoned), paged_mla_attention(**s)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sink", [None, -np.inf, 0.0, np.inf])
def test_empty_rows(rng, sink):
    s = scene(rng) | dict(topk_length=jnp.zeros(6, jnp.int32), extra_topk_length=jnp.full(6, -3, jnp.int32))
    s["attn_sink"] = None if sink is None else jnp.full(3, sink)
    with jax.debug_nans(True):
        out, lse = paged_mla_attention(**s)
    assert (out == 0).all() and (lse == jnp.inf).all()


@pytest.mark.parametrize("b, topk", [(0, 40), (6, 0)])
def test_empty_shapes(rng, b, topk):
    s = scene(rng)
    main = {k: v for k, v in s.items() if "extra" not in k and k != "topk_length"}
    main |= dict(q=main["q"][:b], indices=main["indices"][:b, :topk])
    out, lse = paged_mla_attention(**main)
    assert out.shape == (b, 3, 512) and (out == 0).all() and (lse == jnp.inf).all()


@pytest.mark.parametrize("b", [1, 65536, 70000])
def test_many_rows(rng, b):
    rows = np.eye(4, 512, dtype=np.float32)[None]
    pages = quantize_pages(rows, layout=KVLayout.F32, page_size=4)
    slots = (np.arange(b, dtype=np.int32) % 4)[:, None]
    q = np.zeros((b, 1, 512), np.float32)
    out, lse = paged_mla_attention(q, pages, slots, layout=KVLayout.F32, page_size=4, sm_scale=1.0, d_v=4)
    np.testing.assert_array_equal(out[:, 0], np.eye(4)[slots[:, 0]])
    np.testing.assert_allclose(lse, 0, atol=1e-6)


def test_a_scope_of_width_0_adds_nothing(rng):
    s = scene(rng)
    main = {k: v for k, v in s.items() if "extra" not in k}
    narrow = s | dict(extra_indices=s["extra_indices"][:, :0])
    for a, b in zip(paged_mla_attention(**narrow), paged_mla_attention(**main)):
        np.testing.assert_array_equal(a, b)


def test_gradients(rng):
    s = scene(rng, dtype=np.float32)

    def loss(q, sink):
        out, lse = paged_mla_attention(**(s | dict(q=q, attn_sink=sink)))
        return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    check_grads(jax.jit(loss), (s["q"], s["attn_sink"]), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layout=KVLayout.V32), r"`pages` must have a page stride of"),
        (dict(layout=KVLayout.BF16.with_d(576), pages=jnp.zeros((5, 18432), jnp.uint8)), r"`layout` must have rows of d_qk=512"),
        (dict(indices=jnp.zeros((5, 4), jnp.int32)), r"`indices` must have shape \[b=6, topk\], got \(5, 4\)"),
        (dict(extra_pages=None), r"`extra_pages` must be given with `extra_indices`, got None"),
        (dict(extra_layout=None), r"`extra_layout` must be given with `extra_pages`, got None"),
        (dict(extra_page_size=64), r"`extra_pages` must have a page stride of 37440 bytes"),
        (dict(extra_topk_length=jnp.zeros(5, jnp.int32)), r"`extra_topk_length` must have shape \[b=6\], got \(5,\)"),
        (dict(attn_sink=jnp.zeros(4)), r"`attn_sink` must have shape \[h_q=3\], got \(4,\)"),
        (dict(d_v=0), r"`d_v` must be an int >= 1, got 0"),
        (dict(layout="V4"), r"`layout` must be a KVLayout"),
        (dict(sm_scale="a"), r"`sm_scale` must be a finite number"),
    ],
)  # fmt: skip
def test_bad_arguments(rng, change, message):
    with pytest.raises(ValueError, match=message):
        paged_mla_attention(**(scene(rng) | change))


def test_named_kernel_never_falls_back(rng):
    with pytest.raises(NotImplementedError, match=r"implementation='mosaic_gpu' of paged_mla_attention: .*bfloat16"):
        paged_mla_attention(**scene(rng, dtype=np.float32), implementation="mosaic_gpu")
