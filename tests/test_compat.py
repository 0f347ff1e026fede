"""FlashMLA's interface: its argument names, its golden data, padded pages read where they lie, what it refuses.

The tests with torch tensors need torch, which the project does not; they run on the CPU and, marked `gpu`, on a GPU.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsa_cp_jax.compat import flash_mla
from pallas_kernels import KVLayout, paged_mla_attention, quantize_pages
from tests.helpers.oracles import BF16, GOLDEN, assert_paged_close, assert_sparse_close, golden

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = {576: KVLayout.V32, 512: KVLayout.V4}


def files(pattern: str) -> list[str]:
    return sorted(p.name for p in (GOLDEN / "flashmla").glob(pattern))


# ------------------------------------------------------------------------------------------------- without torch
def test_argument_names():
    """Positional calls of FlashMLA at 082094b mean the same here; sgl-flash-mla 1.0.0 adds what follows."""
    upstream = {
        "flash_mla_sparse_fwd": "q kv indices sm_scale d_v attn_sink topk_length",
        "flash_mla_with_kvcache": "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits"
        " softmax_scale causal is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length"
        " extra_topk_length",
    }
    fork = {
        "flash_mla_sparse_fwd": " use_legacy return_log2_lse",
        "flash_mla_with_kvcache": " enable_batch_invariant use_legacy kv_format descale_q descale_k",
    }
    for name, arguments in upstream.items():
        parameters = inspect.signature(getattr(flash_mla, name)).parameters.values()
        assert [p.name for p in parameters] == (arguments + fork[name]).split()
        assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in parameters)
    meta, num_splits = flash_mla.get_mla_metadata(1, 2, topk=3)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and num_splits is None


def bare_view(pages: np.ndarray, page_size: int, width: int) -> np.ndarray:
    """[num_pages, page_size, 1, width]: the pages without the padding behind their last token, as FlashMLA takes them."""
    strides = (pages.strides[0], width, width, 1)
    return np.lib.stride_tricks.as_strided(pages, (len(pages), page_size, 1, width), strides)


@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 256])
@pytest.mark.parametrize("layout, more", [(KVLayout.V4, 0), (KVLayout.V32, 0), (KVLayout.V32, 656)], ids=str)
def test_page_bytes(rng, layout, more, page_size):
    """The bytes found are the pool's own, padding included, wherever in a larger storage the pool lies."""
    storage = rng.integers(0, 256, (7, layout.page_stride(page_size) + more), dtype=np.uint8)
    for first, last in ((0, 7), (2, 5), (6, 7), (3, 3)):
        pool = storage[first:last]
        view = bare_view(pool, page_size, layout.bytes_per_token)
        offset = first * storage.shape[1]
        n, stride, found = flash_mla.page_bytes(
            "k", view.shape, view.strides, 1, offset=offset, storage_bytes=storage.nbytes
        )
        assert (n, found) == (last - first, layout)
        if n > 1:
            assert stride == storage.shape[1]
        at = np.arange(n)[:, None] * stride + np.arange(layout.page_stride(page_size)) + offset
        np.testing.assert_array_equal(storage.reshape(-1)[at], pool[:, : layout.page_stride(page_size)])


def page_bytes(shape=(5, 64, 1, 584), strides=None, itemsize=1, offset=0, storage=5 * 37440):
    strides = strides or (37440, shape[3] if len(shape) == 4 else 1, 1, 1)
    return flash_mla.page_bytes("k_cache", shape, strides, itemsize, offset=offset, storage_bytes=storage)


@pytest.mark.parametrize(
    "case, error, message",
    [
        (dict(itemsize=2), ValueError, "`k_cache` must have a dtype of one byte (float8_e4m3fn, uint8 or int8)"),
        (dict(shape=(5, 64, 584)), ValueError, "`k_cache` must have shape [num_pages, page_size, 1, bytes_per_token]"),
        (dict(shape=(5, 64, 2, 584)), ValueError, "got (5, 64, 2, 584)"),
        (dict(shape=(5, 64, 1, 528)), NotImplementedError, "`k_cache` of 528 bytes per token is not served"),
        (dict(strides=(37440, 600, 1, 1)), ValueError, "one after another, got strides (37440, 600, 1, 1)"),
        (dict(strides=(37440, 584, 1, 2)), ValueError, "one after another"),
        (dict(strides=(37376, 584, 1, 1)), ValueError, "`k_cache` must have a page stride of 37440 bytes"),
        (dict(strides=(38016, 584, 1, 1)), ValueError, "got 38016"),
        (dict(shape=(5, 64, 1, 656), strides=(41990, 656, 1, 1)), ValueError, "a multiple of 16"),
        (dict(offset=8, storage=10**6), ValueError, "must start at a multiple of 16 bytes of its storage, got 8"),
        (dict(storage=5 * 37440 - 64), ValueError, "5 pages of 37440 bytes from byte 0 end at 187200, the storage at"),
        (dict(offset=576), ValueError, "from byte 576 end at 187776, the storage at 187200"),
    ],
)
def test_page_bytes_refuses(case, error, message):
    page_bytes()
    with pytest.raises(error, match=re.escape(message)):
        page_bytes(**case)


def test_one_page_has_no_stride():
    """Views of one page lose the stride of their first axis (torch.Tensor.view gives 64 * 584 here)."""
    assert page_bytes(shape=(1, 64, 1, 584), strides=(37376, 584, 584, 1), storage=37440)[1] == 37440
    with pytest.raises(ValueError, match="padding of its last page"):
        page_bytes(shape=(1, 64, 1, 584), strides=(37376, 584, 584, 1), storage=37376)


def test_lengths_repeat_over_the_rows_of_a_sequence(rng):
    b, s_q, h_q, topk = 3, 4, 2, 10
    pools = [
        quantize_pages(rng.standard_normal((4, size, 512)).astype(np.float32), layout=KVLayout.V4, page_size=size)
        for size in (8, 2)
    ]
    q = jnp.asarray(rng.standard_normal((b, s_q, h_q, 512)).astype(BF16))
    indices, extra_indices = (jnp.asarray(rng.integers(-1, n, (b, s_q, topk)), jnp.int32) for n in (32, 8))
    lengths, extra_lengths = jnp.array([0, 5, 10], jnp.int32), jnp.array([3, 0, 12], jnp.int32)
    statics = dict(layout=KVLayout.V4, page_size=8, extra_layout=KVLayout.V4, extra_page_size=2, sm_scale=0.1, d_v=512)
    got = flash_mla._paged(
        q, pools[0], indices, lengths, None, pools[1], extra_indices, extra_lengths, **statics
    )  # fmt: skip
    assert got[0].shape == (b, s_q, h_q, 512) and got[1].shape == (b, s_q, h_q)
    for i in range(b):
        same = [jnp.full(s_q, x[i]) for x in (lengths, extra_lengths)]
        want = paged_mla_attention(
            q[i], pools[0], indices[i], same[0], None, pools[1], extra_indices[i], same[1], **statics
        )
        np.testing.assert_array_equal(got[0][i], want.out)
        np.testing.assert_array_equal(got[1][i], want.lse)


# ---------------------------------------------------------------------------------------------------- with torch
@pytest.fixture(params=DEVICES)
def to(request):
    """A function that makes a torch tensor on the CPU or the GPU of a NumPy array (None stays None)."""
    torch = pytest.importorskip("torch")

    def tensor(x, dtype=None):
        if x is None:
            return None
        x = torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)
        return (x if dtype is None else x.view(dtype)).to(request.param)

    return tensor


def numpy(x) -> np.ndarray:
    return x.float().cpu().numpy()


def as_k_cache(pages, page_size: int, width: int):
    """FlashMLA's view of padded pages."""
    return pages[:, : page_size * width].view(len(pages), page_size, 1, width)


@pytest.mark.parametrize("path", files("p*.npz"))
def test_sparse_fwd_is_flashmla(to, path):
    z = golden(f"flashmla/{path}")
    q, kv, indices, sink, length = (to(z.get(k)) for k in ("q", "kv", "indices", "attn_sink", "topk_length"))
    got = flash_mla.flash_mla_sparse_fwd(q, kv, indices, float(z["sm_scale"]), 512, sink, length)
    assert got[0].dtype == q.dtype and got[0].device == q.device
    assert_sparse_close([numpy(x) for x in got], (z["out"], z["max_logits"], z["lse"]))
    again = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, float(z["sm_scale"]), attn_sink=sink, topk_length=length, return_log2_lse=True, use_legacy=True
    )
    np.testing.assert_array_equal(numpy(again[0]), numpy(got[0]))
    for a, b in zip(again[1:], got[1:]):
        np.testing.assert_allclose(numpy(a) * np.log(2), numpy(b), rtol=1e-6)
    out, *none = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, float(z["sm_scale"]), attn_sink=sink, topk_length=length, return_log2_lse=False
    )
    assert none == [None, None] and out.shape == got[0].shape


def golden_decode(to, z, dtype=None):
    """The arguments of FlashMLA's decode test, in its order."""
    width = z["meta"]["bytes_per_token"]
    caches = [
        as_k_cache(to(z[f"{name}k_cache_raw"], dtype), int(z[f"{name}page"]), width) if f"{name}page" in z else None
        for name in ("", "extra_")
    ]
    meta, num_splits = flash_mla.get_mla_metadata()
    return (
        to(z["q"]), caches[0], None, None, 512, meta, num_splits, float(z["sm_scale"]), False, True, to(z["indices"]),
        to(z.get("attn_sink")), caches[1], to(z.get("extra_indices")), to(z.get("topk_length")),
        to(z.get("extra_topk_length")),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint8", "int8"])
@pytest.mark.parametrize("path", files("d*.npz"))
def test_with_kvcache_is_flashmla(to, path, dtype):
    import torch

    z = golden(f"flashmla/{path}")
    args = golden_decode(to, z, getattr(torch, dtype))
    out, lse = flash_mla.flash_mla_with_kvcache(*args)
    assert out.dtype == torch.bfloat16 and out.device == args[0].device
    assert_paged_close((numpy(out), numpy(lse)), (z["out"], z["lse"]))


def test_pages_are_not_copied(to):
    import torch

    device = to(np.zeros(1)).device
    storage = torch.zeros(9, 37440, dtype=torch.uint8, device=device)  # JAX wants 64-byte alignment on the CPU
    for dtype in ("uint8", "float8_e4m3fn", "float8_e8m0fnu", "int8"):
        k_cache = as_k_cache(storage[2:8].view(getattr(torch, dtype)), 64, 584)
        pages, layout, page_size = flash_mla._pages("k_cache", k_cache, storage, None)
        assert (pages.shape, layout, page_size) == ((6, 37440), KVLayout.V4, 64)
        assert pages.unsafe_buffer_pointer() == k_cache.data_ptr() == storage.data_ptr() + 2 * 37440
    x = torch.zeros(64, 4, device=device)
    assert flash_mla._to_jax("x", x, x).unsafe_buffer_pointer() == x.data_ptr()


def test_one_page(to, rng):
    """A pool of one page, whose view has lost its stride, and the same page in a larger pool."""
    pages = np.array(
        quantize_pages(rng.standard_normal((3, 64, 512)).astype(np.float32), layout=KVLayout.V4, page_size=64)
    )
    q = to(rng.standard_normal((2, 1, 4, 512)).astype(BF16))
    indices = rng.integers(0, 64, (2, 1, 7)).astype(np.int32)
    meta, _ = flash_mla.get_mla_metadata()

    def run(pages, indices):
        return flash_mla.flash_mla_with_kvcache(
            q, as_k_cache(pages, 64, 584), None, None, 512, meta, indices=to(indices)
        )

    alone, whole = run(to(pages[1:2].copy()), indices), run(to(pages), indices + 64)
    for a, b in zip(alone, whole):
        np.testing.assert_array_equal(numpy(a), numpy(b))


def test_inputs_that_are_not_contiguous(to, rng):
    """Slices, transposed and expanded tensors give what their contiguous copies give."""
    q, kv = (to(rng.standard_normal(shape).astype(BF16)) for shape in ((6, 2, 1024), (1, 1024, 90)))
    indices = to(rng.integers(-1, 90, (2, 24)).astype(np.int32))[:, None, ::2]
    sink, length = to(np.arange(12, dtype=np.float32))[::2], to(np.full(1, 7, np.int32)).expand(2)
    args = q[..., 100:612].transpose(0, 1), kv[:, :512].permute(2, 0, 1), indices, 0.05, 512, sink, length
    assert not any(x.is_contiguous() for x in args if hasattr(x, "is_contiguous"))
    got = flash_mla.flash_mla_sparse_fwd(*args)
    want = flash_mla.flash_mla_sparse_fwd(*(x.contiguous() if hasattr(x, "contiguous") else x for x in args))
    for a, b in zip(got, want):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    assert got[0].shape == (2, 6, 512)


def test_inputs_at_any_address(to, rng):
    """Slices that are contiguous and start anywhere: XLA takes GPU arrays at multiples of 16 bytes only."""
    q, kv = (to(rng.standard_normal(shape).astype(BF16)) for shape in ((4, 3, 512), (9, 1, 512)))
    indices, length = to(rng.integers(0, 9, (5, 1, 7)).astype(np.int32)), to(np.full(5, 6, np.int32))
    sink = to(np.arange(4, dtype=np.float32))
    slices = indices[1:], sink[1:], length[1:]
    assert all(x.is_contiguous() and x.data_ptr() % 16 for x in slices)

    def run(indices, sink, length):
        return flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05, attn_sink=sink, topk_length=length)

    for a, b in zip(run(*slices), run(*(x.clone() for x in slices))):
        np.testing.assert_array_equal(numpy(a), numpy(b))
    x = to(np.zeros(9, np.float32))
    assert flash_mla._to_jax("x", x[1:], x).unsafe_buffer_pointer() != x[1:].data_ptr()


def decode_call(to, **changes):
    arguments = dict(
        q=to(np.zeros((2, 3, 4, 512), BF16)), k_cache=as_k_cache(to(np.zeros((2, 37440), np.uint8)), 64, 584),
        block_table=None, cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0],
        indices=to(np.zeros((2, 3, 5), np.int32)),
    )  # fmt: skip
    return flash_mla.flash_mla_with_kvcache(**(arguments | changes))


def test_with_kvcache_refuses(to):
    out, lse = decode_call(to)
    assert out.shape == (2, 3, 4, 512) and lse.shape == (2, 4, 3)
    decode_call(to, num_splits=None, is_fp8_kvcache=True, kv_format="V4", use_legacy=True)
    i32 = lambda *shape: to(np.zeros(shape, np.int32))  # noqa: E731
    for changes, error, message in [
        (dict(indices=None), NotImplementedError, "`indices` must be given: dense decoding"),
        (dict(causal=True), NotImplementedError, "`causal`"),
        (dict(is_fp8_kvcache=False), NotImplementedError, "`is_fp8_kvcache`"),
        (dict(enable_batch_invariant=True), NotImplementedError, "`enable_batch_invariant`"),
        (dict(descale_q=i32(2)), NotImplementedError, "`descale_q`"),
        (dict(descale_k=i32(2)), NotImplementedError, "`descale_k`"),
        (dict(kv_format="V41"), NotImplementedError, "`kv_format`"),
        (dict(kv_format="V32"), ValueError, "`kv_format` must be 'V4' for the 584 bytes a token of `k_cache`"),
        (dict(k_cache=to(np.zeros((2, 64, 1, 584), np.uint8))), ValueError, "page stride of 37440 bytes"),
        (dict(k_cache=as_k_cache(to(np.zeros((2, 37440), np.float32)), 64, 584)), ValueError, "dtype of one byte"),
        (dict(indices=i32(2, 5)), ValueError, "`indices` must have shape [b=2, s_q=3, topk], got (2, 5)"),
        (dict(indices=to(np.zeros((2, 3, 5), np.int64))), ValueError, "`indices` must have a dtype of at most 32 bits"),
        (dict(topk_length=i32(2, 3)), ValueError, "`topk_length` must have shape [b=2]"),
        (dict(q=to(np.zeros((2, 4, 512), BF16))), ValueError, "`q` must have shape [b, s_q, h_q, d_qk]"),
        (dict(q=np.zeros((2, 3, 4, 512), BF16)), ValueError, "`q` must be a torch tensor, got ndarray"),
        (dict(k_cache=None), ValueError, "`k_cache` must be a torch tensor, got NoneType"),
        (
            dict(extra_k_cache="pages", extra_indices_in_kvcache=i32(2, 3, 5)),
            ValueError,
            "`extra_k_cache` must be a torch tensor, got str",
        ),
        (
            dict(extra_indices_in_kvcache=i32(2, 3, 5)),
            ValueError,
            "`extra_k_cache` and `extra_indices_in_kvcache` must",
        ),
        (dict(extra_k_cache=as_k_cache(to(np.zeros((2, 37440), np.uint8)), 64, 584)), ValueError, "given together"),
        (dict(head_dim_v=600), ValueError, "`head_dim_v` must be <= 512 for V4 pages, got 600"),
        (dict(head_dim_v=None), ValueError, "`head_dim_v` must be an int"),
        (dict(softmax_scale="1"), ValueError, "`softmax_scale` must be a finite number"),
        (dict(q=to(np.zeros((2, 3, 4, 576), BF16))), ValueError, "d_qk=576"),
    ]:
        with pytest.raises(error, match=re.escape(message)):
            decode_call(to, **changes)
    q = to(np.zeros((2, 4, 512), BF16))
    for changes, message in [
        (dict(kv=to(np.zeros((5, 2, 512), BF16))), "`kv` must have shape [s_kv, h_kv=1, d_qk=512], got (5, 2, 512)"),
        (dict(kv=to(np.zeros((5, 1, 512), np.float32))), "`kv` must have dtype bfloat16, got float32"),
        (dict(indices=i32(2, 5)), "`indices` must have shape [s_q=2, h_kv=1, topk], got (2, 5)"),
        (dict(kv=None), "`kv` must be a torch tensor, got NoneType"),
        (dict(q=q.half()), "`q` must have dtype bfloat16 or float32, got float16"),
        (dict(sm_scale=None), "`sm_scale` must be a finite number"),
        (dict(q=None), "`q` must be a torch tensor, got NoneType"),
        (dict(kv=q[:, :1].to("meta")), f"`kv` must be on the device of `q`, {q.device}, got meta"),
    ]:
        arguments = dict(q=q, kv=to(np.zeros((5, 1, 512), BF16)), indices=i32(2, 1, 5), sm_scale=1.0)
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_mla.flash_mla_sparse_fwd(**(arguments | changes))


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)], ids=str)
def test_empty(to, shape):
    s_q, s_kv, topk = shape
    q, kv = to(np.ones((s_q, 4, 512), BF16)), to(np.ones((s_kv, 1, 512), BF16))
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, to(np.zeros((s_q, 1, topk), np.int32)), 1.0)
    assert out.shape == (s_q, 4, 512) and not numpy(out).any()
    assert (numpy(max_logits) == -np.inf).all() and (numpy(lse) == np.inf).all()


def test_tensors_that_require_gradients(to):
    q = to(np.ones((2, 4, 512), np.float32)).requires_grad_()
    out, *_ = flash_mla.flash_mla_sparse_fwd(q, q.detach()[:, :1], to(np.zeros((2, 1, 3), np.int32)), 1.0)
    assert not out.requires_grad


# ------------------------------------------------------------------------------------------------------ on a GPU
@pytest.mark.gpu
def test_streams_and_memory(rng):
    """Results are right while torch writes inputs just before the call, frees them just after it, and reuses memory."""
    torch = pytest.importorskip("torch")
    kv = torch.randn(4096, 1, 512, dtype=torch.bfloat16, device="cuda")
    indices = torch.randint(0, 4096, (1024, 1, 640), dtype=torch.int32, device="cuda")
    q = torch.randn(1024, 64, 512, dtype=torch.bfloat16, device="cuda")
    want = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)[0].clone()
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for i in range(20):
                mine = [x.clone() for x in (q, kv, indices)]
                for x in mine[:2]:  # a slow way to write the same values late
                    x.zero_()
                    torch.cuda._sleep(200_000)
                    x.copy_(q if x.shape == q.shape else kv)
                out = flash_mla.flash_mla_sparse_fwd(*mine, 0.05)[0]
                for x in mine:
                    x.zero_()
                del mine, x
                garbage = [torch.full_like(q, 7.0) for _ in range(3)]
                assert torch.equal(out, want), i
                del garbage
        torch.cuda.synchronize()


@pytest.mark.multi_gpu
def test_on_every_gpu():
    """Tensors of a GPU that is not torch's current one, as FlashMLA takes them."""
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees fewer than two GPUs")
    q = torch.randn(4, 64, 512, dtype=torch.bfloat16)
    kv, indices = torch.randn(90, 1, 512, dtype=torch.bfloat16), torch.randint(0, 90, (4, 1, 128), dtype=torch.int32)
    outs = []
    torch.cuda.set_device(0)  # JAX's start may have left another one
    for i in range(torch.cuda.device_count()):
        out, *_ = flash_mla.flash_mla_sparse_fwd(*(x.to(f"cuda:{i}") for x in (q, kv, indices)), 0.05)
        assert out.device.index == i and torch.cuda.current_device() == 0
        outs.append(numpy(out))
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@pytest.mark.gpu
def test_graph_capture():
    torch = pytest.importorskip("torch")
    q = torch.zeros(2, 4, 512, dtype=torch.bfloat16, device="cuda")
    kv, indices = q[:, :1].contiguous(), torch.zeros(2, 1, 3, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="CUDA graph"), torch.cuda.graph(graph):
        q + 1  # torch warns of empty graphs
        flash_mla.flash_mla_sparse_fwd(q, kv, indices, 1.0)
    assert flash_mla.flash_mla_sparse_fwd(q, kv, indices, 1.0)[0].shape == (2, 4, 512)


@pytest.mark.gpu
def test_runs_the_kernels():
    """On a Hopper GPU the drop-in runs the Mosaic kernels, never plain JAX."""
    q, kv = jnp.zeros((4, 64, 512), jnp.bfloat16), jnp.zeros((9, 1, 512), jnp.bfloat16)
    lowered = flash_mla._sparse.lower(
        q, kv, jnp.zeros((4, 1, 128), jnp.int32), None, None, sm_scale=1.0, d_v=512, log2=False
    )
    assert "mosaic_gpu" in lowered.as_text() and jax.devices()[0].platform == "gpu"
    statics = dict(layout=KVLayout.V4, page_size=64, extra_layout=None, extra_page_size=None, sm_scale=1.0, d_v=512)
    pages, slots = jnp.zeros((2, KVLayout.V4.page_stride(64)), jnp.uint8), jnp.zeros((4, 1, 128), jnp.int32)
    lowered = flash_mla._paged.lower(q[:, None], pages, slots, *[None] * 5, **statics)
    assert "mosaic_gpu" in lowered.as_text()
