"""Plain jnp definition of the paged gather: also implementation "xla"."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.kv_rows import dequantize_rows, read_records


def gather_dequant(pages, slots, *, layout: KVLayout, page_size: int, num_slots=None) -> jax.Array:
    """See `pallas_kernels.gather_dequant`. Rows at or past `num_slots` come out zero here."""
    if num_slots is not None:
        slots = jnp.where(lax.iota(jnp.int32, slots.shape[0]) < num_slots, slots, -1)
    records, valid = read_records(pages, slots, layout=layout, page_size=page_size)
    return jnp.where(valid[:, None], dequantize_rows(records, layout=layout), 0)


def gather_workspace(
    compressed_pages,
    compressed_slots,
    swa_pages,
    swa_slots,
    *,
    compressed_layout,
    compressed_page_size,
    swa_layout,
    swa_page_size,
    num_compressed=None,
    num_swa=None,
) -> jax.Array:
    """See `pallas_kernels.gather_workspace`."""
    swa = gather_dequant(swa_pages, swa_slots, layout=swa_layout, page_size=swa_page_size, num_slots=num_swa)
    if compressed_pages is None:
        return swa
    compressed = gather_dequant(
        compressed_pages,
        compressed_slots,
        layout=compressed_layout,
        page_size=compressed_page_size,
        num_slots=num_compressed,
    )
    return jnp.concatenate([compressed, swa])
