"""KVPool: a paged KV pool as a pytree, and writing to it."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import KVLayout, quantize_rows, write_records
from pallas_kernels.common import check_array, check_int, check_type


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPool:
    """A paged pool of KV rows: slot = page * page_size + offset.

    Attributes:
      pages: [num_pages, stride] uint8.
      layout: where a token's bytes sit in a page (static).
      page_size: tokens, or compressed entries, per page (static).
    """

    pages: jax.Array
    _: dataclasses.KW_ONLY
    layout: KVLayout = dataclasses.field(metadata=dict(static=True))
    page_size: int = dataclasses.field(metadata=dict(static=True))

    def __post_init__(self):
        _check_statics(self.layout, self.page_size)

    @classmethod
    def zeros(cls, num_pages: int, *, layout: KVLayout, page_size: int) -> "KVPool":
        """An empty pool of `num_pages` pages.

        Raises:
          ValueError: a page count or page size that is not positive.
        """
        _check_statics(layout, page_size)
        pages = jnp.zeros((check_int("num_pages", num_pages), layout.page_stride(page_size)), jnp.uint8)
        return cls(pages, layout=layout, page_size=page_size)

    @property
    def num_slots(self) -> int:
        """Rows that the pool holds."""
        return self.pages.shape[0] * self.page_size


def _check_statics(layout, page_size) -> None:
    if not isinstance(layout, KVLayout):
        raise ValueError(f"`layout` must be a KVLayout, got {layout!r}.")
    check_int("page_size", page_size)


def check_pool(name: str, pool, page_size: int, d_qk: int) -> None:
    """ValueError unless `pool` is a KVPool with pages of that size and rows of that width."""
    check_type(name, pool, KVPool)
    if pool.page_size != page_size or pool.layout.d != d_qk:
        raise ValueError(
            f"`{name}` must have page_size={page_size} and rows of d_qk={d_qk} (config), got "
            f"page_size={pool.page_size} and {pool.layout!r}."
        )
    pool.layout.check_pages(f"{name}.pages", pool.pages, pool.page_size)


def write_kv(pool: KVPool, slots: jax.Array, rows: jax.Array) -> KVPool:
    """Quantises rows and writes them to slots of a pool.

    Args:
      pool: the pool; donate it under jit to write in place.
      slots: [n] int32 global slots, distinct where inside the pool; a slot outside (-1, say) is not written.
      rows: [n, layout.d] bfloat16 or float32; or [n, layout.bytes_per_token] uint8, rows that `quantize_rows` encoded
        already (under context parallelism that is what is worth gathering: 584 bytes a token instead of 1024).

    Returns:
      The new pool.

    Raises:
      ValueError: a wrong shape, dtype or page stride.
    """
    check_type("pool", pool, KVPool)
    (n,) = check_array("slots", slots, jnp.int32, n=None)
    if getattr(rows, "dtype", None) == jnp.uint8:
        check_array("rows", rows, jnp.uint8, n=n, bytes_per_token=pool.layout.bytes_per_token)
    else:
        check_array("rows", rows, (jnp.bfloat16, jnp.float32), n=n, d=pool.layout.d)
        rows = quantize_rows(rows, layout=pool.layout)
    pages = write_records(pool.pages, slots, rows, layout=pool.layout, page_size=pool.page_size)
    return dataclasses.replace(pool, pages=pages)
