"""FlashMLA's Python interface on this project's kernels, for torch tensors: a script runs with its import swapped.

    from dsa_cp_jax.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Tensors pass through dlpack, without a copy. Both frameworks order their work by events: ours waits for what torch has
queued on its current stream, and torch's current stream waits for our results. The results are JAX's memory, free for
its next computation when torch drops them: docs/compat.md says what that means for several streams. A new combination
of shapes compiles anew. Nothing is differentiable here, as in FlashMLA. Hopper GPUs run the kernels, any other device
plain JAX.

Source: `flash_mla/flash_mla_interface.py` of https://github.com/deepseek-ai/FlashMLA at 082094b, and of sgl-flash-mla
1.0.0, whose further arguments (`use_legacy` and what follows it) are taken, too.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import KVLayout, paged_mla_attention, sparse_mla_attention
from pallas_kernels.common import check_array, check_int, check_real

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclasses.dataclass
class FlashMLASchedMeta:
    """Stands for FlashMLA's schedule. It holds nothing: our kernels schedule themselves, so any reuse is right."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """What `flash_mla_with_kvcache` takes as its schedule, as a pair like FlashMLA's.

    Args:
      *args: ignored, as in FlashMLA.
      **kwargs: ignored.

    Returns:
      (FlashMLASchedMeta(), None).
    """
    return FlashMLASchedMeta(), None


def flash_mla_sparse_fwd(
    q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False, return_log2_lse=None
):
    """`sparse_mla_attention` on torch tensors.

    Args:
      q: [s_q, h_q, d_qk] bfloat16 or float32, any number of heads.
      kv: [s_kv, h_kv=1, d_qk], q's dtype.
      indices: [s_q, h_kv=1, topk] int32; a value outside 0..s_kv-1 is no key.
      sm_scale: factor of the logits.
      d_v: values per head.
      attn_sink: [h_q] float32, or None.
      topk_length: [s_q] int32, or None.
      use_legacy: accepted; there is one kernel.
      return_log2_lse: None: natural logs; True: max_logits and lse in base 2; False: None in their places.

    Returns:
      (out [s_q, h_q, d_v] in q's dtype, max_logits [s_q, h_q] float32, lse [s_q, h_q] float32), torch tensors.

    Raises:
      ValueError: a wrong shape, dtype or device.
      NotImplementedError: a call while a CUDA graph is captured.
    """
    sm_scale = check_real("sm_scale", sm_scale)
    tensors = dict(q=q, kv=kv, indices=indices, topk_length=topk_length, attn_sink=attn_sink)
    with _device_of(q):
        arrays = {name: _to_jax(name, x, q) for name, x in tensors.items()}
        out, *logs = _run(_sparse, arrays, sm_scale=sm_scale, d_v=d_v, log2=return_log2_lse is True)
    return out, *((None, None) if return_log2_lse is False else logs)


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    topk_length=None, extra_topk_length=None, enable_batch_invariant=False, use_legacy=False, kv_format=None,
    descale_q=None, descale_k=None,
):  # fmt: skip
    """`paged_mla_attention` on torch tensors: FlashMLA's sparse form on FP8 pages.

    Args:
      q: [b, s_q, h_q, d_qk] bfloat16 or float32; d_qk 512 (V4 pages) or 576 (V32 pages).
      k_cache: [num_pages, page_size, 1, bytes_per_token] of a one-byte dtype, 584 (V4) or 656 (V32) bytes a token. A
        view of padded pages is read where it lies, as [num_pages, stride] bytes; the last page's padding, too, must be
        in its storage.
      block_table, cache_seqlens: ignored; `indices` holds physical slots.
      head_dim_v: values per head.
      tile_scheduler_metadata, num_splits: ignored.
      softmax_scale: factor of the logits; None: d_qk ** -0.5.
      causal: False.
      is_fp8_kvcache: True or None.
      indices: [b, s_q, topk] int32, slot = page * page_size + offset; a value outside the pool is no key.
      attn_sink: [h_q] float32, or None.
      extra_k_cache, extra_indices_in_kvcache: a second pool, with a page size of its own, and its slots; or None.
      topk_length, extra_topk_length: [b] int32, the same for all s_q rows of a sequence; or None.
      enable_batch_invariant: False.
      use_legacy: accepted; there is one kernel.
      kv_format: None, or the format that bytes_per_token says: "V4" or "V32".
      descale_q, descale_k: None.

    Returns:
      (out [b, s_q, h_q, head_dim_v] in q's dtype, lse [b, h_q, s_q] float32, natural log), torch tensors.

    Raises:
      ValueError: a wrong shape, dtype, device, page stride or storage.
      NotImplementedError: dense decoding and every other argument that is not served, by name.
    """
    if indices is None:
        raise NotImplementedError("`indices` must be given: dense decoding is not served.")
    served = dict(
        causal=not causal, is_fp8_kvcache=is_fp8_kvcache in (None, True), kv_format=kv_format in (None, "V4", "V32"),
        enable_batch_invariant=not enable_batch_invariant, descale_q=descale_q is None, descale_k=descale_k is None,
    )  # fmt: skip
    for name, ok in served.items():
        if not ok:
            raise NotImplementedError(
                f"`{name}` must be left alone: only sparse decoding of V4 and V32 pages is served."
            )
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None):
        raise ValueError("`extra_k_cache` and `extra_indices_in_kvcache` must be given together, or neither.")
    head_dim_v = check_int("head_dim_v", head_dim_v)
    tensors = dict(q=q, indices=indices, topk_length=topk_length, attn_sink=attn_sink)
    extra = dict(extra_indices_in_kvcache=extra_indices_in_kvcache, extra_topk_length=extra_topk_length)
    with _device_of(q):
        arrays = {name: _to_jax(name, x, q) for name, x in (tensors | extra).items()}
        arrays["k_cache"], layout, page_size = _pages("k_cache", k_cache, q, kv_format)
        arrays["extra_k_cache"], extra_layout, extra_page_size = _pages("extra_k_cache", extra_k_cache, q, kv_format)
        out, lse = _run(
            _paged, arrays, layout=layout, page_size=page_size, extra_layout=extra_layout,
            extra_page_size=extra_page_size, d_v=head_dim_v,
            sm_scale=q.shape[-1] ** -0.5 if softmax_scale is None else check_real("softmax_scale", softmax_scale),
        )  # fmt: skip
    return out, lse.transpose(1, 2)


@functools.partial(jax.jit, static_argnames=("sm_scale", "d_v", "log2"))
def _sparse(q, kv, indices, topk_length, attn_sink, *, sm_scale, d_v, log2):
    check_array("q", q, (jnp.bfloat16, jnp.float32), s_q=None, h_q=None, d_qk=None)
    check_array("kv", kv, q.dtype, s_kv=None, h_kv=1, d_qk=q.shape[-1])
    check_array("indices", indices, jnp.int32, s_q=q.shape[0], h_kv=1, topk=None)
    out, *logs = sparse_mla_attention(q, kv[:, 0], indices[:, 0], topk_length, attn_sink, sm_scale=sm_scale, d_v=d_v)
    return out, *(x / math.log(2) if log2 else x for x in logs)


@functools.partial(
    jax.jit, static_argnames=("layout", "page_size", "extra_layout", "extra_page_size", "sm_scale", "d_v")
)
def _paged(
    q, k_cache, indices, topk_length, attn_sink, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, **statics
):
    layout, d_v = statics["layout"], statics["d_v"]
    if d_v > layout.d:
        raise ValueError(f"`head_dim_v` must be <= {layout.d} for {layout.name} pages, got {d_v}.")
    b, s_q, h_q, d_qk = check_array("q", q, (jnp.bfloat16, jnp.float32), b=None, s_q=None, h_q=None, d_qk=None)

    def rows(name, indices, length_name, length):
        if indices is not None:
            _, _, topk = check_array(name, indices, jnp.int32, b=b, s_q=s_q, topk=None)
            indices = indices.reshape(b * s_q, topk)
        if length is not None:
            check_array(length_name, length, jnp.int32, b=b)
            length = jnp.repeat(length, s_q, total_repeat_length=b * s_q)
        return indices, length

    indices, topk_length = rows("indices", indices, "topk_length", topk_length)
    extra_indices, extra_length = rows(
        "extra_indices_in_kvcache", extra_indices_in_kvcache, "extra_topk_length", extra_topk_length
    )
    out, lse = paged_mla_attention(
        q.reshape(b * s_q, h_q, d_qk), k_cache, indices, topk_length, attn_sink, extra_k_cache, extra_indices,
        extra_length, **statics,
    )  # fmt: skip
    return out.reshape(b, s_q, h_q, out.shape[-1]), lse.reshape(b, s_q, h_q)


def _device_of(q):
    """Makes q's GPU the current one of torch, as FlashMLA does: dlpack hands tensors over from that one only."""
    try:
        import torch
    except ModuleNotFoundError as error:
        message = (
            "This is FlashMLA's interface for torch tensors, and torch is not installed: pip install -e '.[compare]'."
        )
        raise ModuleNotFoundError(f"{message} JAX arrays go to pallas_kernels.") from error

    return torch.cuda.device(q.device) if getattr(q, "is_cuda", False) else contextlib.nullcontext()


def _run(function, arrays: dict, **statics) -> list:
    """Runs a function of JAX arrays on the device of its `q`, and hands its results to torch."""
    import torch

    with jax.default_device(arrays["q"].device):
        results = function(**arrays, **statics)
    # `arrays` must live until torch's stream waits for the results: their memory is torch's, and free for it after.
    return [torch.from_dlpack(x) for x in results]


_OPTIONAL = ("topk_length", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


def _check_tensor(name: str, x, q) -> None:
    import torch

    if not isinstance(x, torch.Tensor):
        raise ValueError(f"`{name}` must be a torch tensor, got {type(x).__name__}.")
    if x.device != q.device:
        raise ValueError(f"`{name}` must be on the device of `q`, {q.device}, got {x.device}.")
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError("CUDA graph capture is not served: JAX launches on streams of its own.")


def _to_jax(name: str, x, q) -> jax.Array | None:
    """A torch tensor as a JAX array over the same memory.

    It is copied first if it is not contiguous, or does not start at a multiple of 16 bytes: XLA takes no other on GPUs.
    """
    if x is None and name in _OPTIONAL:
        return None
    _check_tensor(name, x, q)
    if x.element_size() > 4:  # JAX would cut off the upper half
        raise ValueError(f"`{name}` must have a dtype of at most 32 bits, got {x.dtype}.")
    x = x.detach().contiguous()
    return jax.dlpack.from_dlpack(x.clone() if x.data_ptr() % 16 else x)


def _pages(name: str, x, q, kv_format: str | None):
    """A view of FP8 pages as ([num_pages, stride] uint8, layout, page size), over the same memory."""
    if x is None and name in _OPTIONAL:
        return None, None, None
    import torch

    _check_tensor(name, x, q)
    storage = x.untyped_storage()
    num_pages, stride, layout = page_bytes(
        name, tuple(x.shape), x.stride(), x.element_size(), offset=x.storage_offset(), storage_bytes=storage.nbytes()
    )
    if kv_format not in (None, layout.name):
        raise ValueError(
            f"`kv_format` must be {layout.name!r} for the {layout.bytes_per_token} bytes a token of `{name}`."
        )
    pages = x.detach().view(torch.uint8).as_strided((num_pages, stride), (stride, 1))
    return jax.dlpack.from_dlpack(pages), layout, x.shape[1]


def page_bytes(
    name: str, shape: tuple, strides: tuple, itemsize: int, *, offset: int, storage_bytes: int
) -> tuple[int, int, KVLayout]:
    """Where the pages lie that a view [num_pages, page_size, 1, bytes_per_token] shows without their padding.

    Args:
      name: the argument's name, for errors.
      shape, strides: of the view, in elements.
      itemsize: bytes of an element, 1.
      offset: where the view starts in its storage, in bytes.
      storage_bytes: length of the storage.

    Returns:
      (num_pages, stride, layout): page p is the bytes offset + p * stride ... offset + (p + 1) * stride - 1.

    Raises:
      ValueError: another shape or dtype, tokens that do not follow one another, a stride that the layout does not
        allow, pages that end behind the storage or do not start at a multiple of 16 bytes.
      NotImplementedError: another number of bytes per token.
    """
    if itemsize != 1:
        raise ValueError(
            f"`{name}` must have a dtype of one byte (float8_e4m3fn, uint8 or int8), got {itemsize} bytes."
        )
    if len(shape) != 4 or shape[2] != 1:
        raise ValueError(f"`{name}` must have shape [num_pages, page_size, 1, bytes_per_token], got {shape}.")
    num_pages, page_size, _, width = shape
    layouts = {layout.bytes_per_token: layout for layout in (KVLayout.V4, KVLayout.V32)}
    if width not in layouts:
        raise NotImplementedError(
            f"`{name}` of {width} bytes per token is not served: only 584 (V4) and 656 (V32) are."
        )
    layout = layouts[width]
    if strides[3] != 1 or (page_size > 1 and strides[1] != width):
        raise ValueError(f"`{name}` must hold the bytes of a page one after another, got strides {strides}.")
    # The stride of an axis of length 1 means nothing.
    stride = strides[0] if num_pages > 1 else layout.page_stride(page_size)
    layout.check_pages(name, jax.ShapeDtypeStruct((num_pages, stride), jnp.uint8), page_size)
    if offset % 16:
        raise ValueError(f"`{name}` must start at a multiple of 16 bytes of its storage, got {offset}.")
    if (end := offset + num_pages * stride) > storage_bytes:
        raise ValueError(
            f"`{name}` must lie in its storage with the padding of its last page: {num_pages} pages of {stride} bytes"
            f" from byte {offset} end at {end}, the storage at {storage_bytes}."
        )
    return num_pages, stride, layout
