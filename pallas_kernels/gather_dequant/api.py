"""Paged gather + dequantisation: pool slots to a flat workspace of rows."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import as_count, check_array, interpreter, match_varying, resolve_implementation
from pallas_kernels.gather_dequant import reference
from pallas_kernels.kv_layout import KVLayout, check_layout


def _check(prefix: str, pages, slots, count_name: str, count, layout, page_size) -> None:
    check_layout(f"{prefix}layout", layout).check_pages(f"{prefix}pages", pages, page_size)
    check_array(f"{prefix}slots", slots, jnp.int32, n=None)
    if count is not None:
        check_array(count_name, count, jnp.int32)


def _unsupported(*layouts: KVLayout) -> str | None:
    from pallas_kernels.gather_dequant import mosaic_gpu

    return next((reason for layout in layouts if (reason := mosaic_gpu.unsupported(layout))), None)


def gather_dequant(
    pages, slots, *, layout: KVLayout, page_size: int, num_slots=None, implementation=None, interpret=False
) -> jax.Array:
    """Gathers rows of a paged KV pool by slot and dequantises them.

    out[i] = the row in page slots[i] // page_size at token slots[i] % page_size. A quantised value is
    f32(e4m3fn) * f32(scale), rounded once to bfloat16: bit-exact for V4 (products below 2^-126 may flush to zero).

    Args:
      pages: [num_pages, stride] uint8, stride as `layout.page_stride(page_size)` says. Slack bytes may hold anything.
      slots: [n] int32, any order; a slot outside [0, num_pages * page_size) gives a zero row.
      layout: the pool's KVLayout.
      page_size: tokens per page, any >= 1.
      num_slots: int32 scalar, may be traced: how many slots are live. Rows at or past it are not read, and unspecified
        in the result. None: all n.
      implementation: None, "xla" or "mosaic_gpu" (Hopper; layouts V4, V32 and BF16).
      interpret: run the Mosaic kernel in Pallas' interpreter on CPU (True, or `plgpu.InterpretGPUParams`).

    Returns:
      [n, layout.d] in layout.dtype.

    Raises:
      ValueError: a wrong shape, dtype or page stride.
      NotImplementedError: "mosaic_gpu" was named for a layout that the kernel does not serve.

    Source: byte layouts of FlashMLA `tests/quant.py`; SGLang gathers once per layer in the same way
    (`python/sglang/srt/layers/attention/dsv4/`).
    """
    num_slots = as_count("num_slots", num_slots)
    _check("", pages, slots, "num_slots", num_slots, layout, page_size)
    chosen = resolve_implementation("gather_dequant", implementation, interpret, lambda: _unsupported(layout), pages)
    pages, slots = jnp.asarray(pages), jnp.asarray(slots)
    kwargs = dict(layout=layout, page_size=page_size, num_slots=num_slots)
    with jax.named_scope("gather_dequant"):
        if chosen == "xla" or slots.shape[0] == 0:
            return reference.gather_dequant(pages, slots, **kwargs)
        from pallas_kernels.gather_dequant import mosaic_gpu

        rows = mosaic_gpu.gather_dequant(pages, slots, **kwargs, interpret=interpreter(interpret))
        return match_varying(rows, pages, slots)


def gather_workspace(
    compressed_pages,
    compressed_slots,
    swa_pages,
    swa_slots,
    *,
    compressed_layout: KVLayout | None,
    compressed_page_size: int | None,
    swa_layout: KVLayout,
    swa_page_size: int,
    num_compressed=None,
    num_swa=None,
    implementation=None,
    interpret=False,
) -> jax.Array:
    """Gathers the compressed and the SWA pool into one workspace `[compressed | SWA]`.

    The rows of `gather_dequant(compressed_*)` followed by those of `gather_dequant(swa_*)`, in one buffer.

    Args:
      compressed_pages: [num_pages, stride] uint8, or None (a c0 layer; then every compressed_* is None).
      compressed_slots: [n_c] int32; a slot outside the pool gives a zero row.
      swa_pages: [num_pages, stride] uint8.
      swa_slots: [n_s] int32.
      compressed_layout, compressed_page_size, swa_layout, swa_page_size: of the two pools; both layouts give rows of
        one width and dtype.
      num_compressed, num_swa: int32 scalars, may be traced: live slots of each part (see `gather_dequant`).
      implementation, interpret: as in `gather_dequant`.

    Returns:
      [n_c + n_s, d] in the layouts' dtype.

    Raises:
      ValueError: a wrong shape, dtype or page stride, or layouts whose rows differ.
      NotImplementedError: "mosaic_gpu" was named for a layout that the kernel does not serve.
    """
    num_compressed, num_swa = as_count("num_compressed", num_compressed), as_count("num_swa", num_swa)
    _check("swa_", swa_pages, swa_slots, "num_swa", num_swa, swa_layout, swa_page_size)
    compressed = dict(
        compressed_slots=compressed_slots,
        compressed_layout=compressed_layout,
        compressed_page_size=compressed_page_size,
    )
    for name, value in compressed.items():
        if (value is None) != (compressed_pages is None):
            raise ValueError(
                f"`{name}` and `compressed_pages` go together (both None for a c0 layer), "
                f"got {'None' if value is None else 'a value'} with compressed_pages "
                f"{'None' if compressed_pages is None else 'given'}."
            )
    if compressed_pages is None and num_compressed is not None:
        raise ValueError("`num_compressed` must be None where `compressed_pages` is, got a value.")
    layouts = [swa_layout]
    if compressed_layout is not None and compressed_page_size is not None:
        _check(
            "compressed_",
            compressed_pages,
            compressed_slots,
            "num_compressed",
            num_compressed,
            compressed_layout,
            compressed_page_size,
        )
        layouts.append(compressed_layout)
        if (compressed_layout.d, compressed_layout.dtype) != (swa_layout.d, swa_layout.dtype):
            raise ValueError(
                f"`compressed_layout` must give rows like `swa_layout` {swa_layout!r} (d={swa_layout.d}, "
                f"{swa_layout.dtype.name}), got {compressed_layout!r} (d={compressed_layout.d}, "
                f"{compressed_layout.dtype.name})."
            )
    chosen = resolve_implementation(
        "gather_workspace", implementation, interpret, lambda: _unsupported(*layouts), swa_pages
    )
    args = jax.tree.map(jnp.asarray, (compressed_pages, compressed_slots, swa_pages, swa_slots))
    kwargs = dict(
        compressed_layout=compressed_layout,
        compressed_page_size=compressed_page_size,
        swa_layout=swa_layout,
        swa_page_size=swa_page_size,
        num_compressed=num_compressed,
        num_swa=num_swa,
    )
    with jax.named_scope("gather_workspace"):
        if chosen == "xla":
            return reference.gather_workspace(*args, **kwargs)
        from pallas_kernels.gather_dequant import mosaic_gpu

        return match_varying(mosaic_gpu.gather_workspace(*args, **kwargs, interpret=interpreter(interpret)), *args)
