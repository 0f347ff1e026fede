"""Round-robin context parallelism: which rank holds which row of a chunk. Index arithmetic only.

Chunk row g lives on rank g % cp_size, as its local row g // cp_size. The modulo is of the row in the chunk, never of a
position in a sequence. ("Round robin" is what SGLang calls interleave and TransformerEngine striped.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.common import cdiv, check_array, check_int


def _with_whole_rows(x) -> jax.Array:
    """`x` as an array with its first axis whole on every device: Explicit axes do not let rows move between ranks."""
    if not hasattr(x, "shape") or not x.shape:
        raise ValueError(f"`x` must be an array [rows, ...], got {x if not hasattr(x, 'shape') else x.shape}.")
    dtype, x = x.dtype, jnp.asarray(x)
    if x.dtype != dtype:
        raise ValueError(f"`x` must have a dtype that JAX keeps, got {dtype}, of which it makes {x.dtype}.")
    sharding = jax.typeof(x).sharding
    if sharding.spec and sharding.spec[0] is not None:
        x = jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:])))
    return x


def split_round_robin(x: jax.Array, cp_size: int) -> jax.Array:
    """Chunk order -> rank order: rank 0's rows, then rank 1's, ...

    Args:
      x: [n, ...] rows in chunk order.
      cp_size: number of ranks.

    Returns:
      [cp_size * ceil(n / cp_size), ...]: row r * ceil(n / cp_size) + k is chunk row r + cp_size * k, zero where that is
      past n.

    Raises:
      ValueError: cp_size < 1, no array of rows, or one of NumPy's with 64 bits a number.
    """
    cp_size, x = check_int("cp_size", cp_size), _with_whole_rows(x)
    rows = cdiv(x.shape[0], cp_size)
    x = jnp.pad(x, [(0, rows * cp_size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(rows, cp_size, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def merge_round_robin(x: jax.Array, cp_size: int, n: int) -> jax.Array:
    """Rank order -> chunk order, padding rows cut off: the inverse of `split_round_robin`.

    Args:
      x: [cp_size * rows_per_rank, ...] in rank order.
      cp_size: number of ranks.
      n: rows of the chunk to keep, <= x.shape[0].

    Returns:
      [n, ...]: row g is x[(g % cp_size) * rows_per_rank + g // cp_size].

    Raises:
      ValueError: cp_size < 1, a row count that it does not divide, or n outside 0..rows.
    """
    cp_size, n, x = check_int("cp_size", cp_size), check_int("n", n, 0), _with_whole_rows(x)
    if x.shape[0] % cp_size:
        raise ValueError(f"`x` must have a row count divisible by cp_size={cp_size}, got {x.shape[0]} rows.")
    if n > x.shape[0]:
        raise ValueError(f"`n` must be in 0..{x.shape[0]} (the rows of `x`), got {n}.")
    return x.reshape(cp_size, x.shape[0] // cp_size, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)[:n]


def rank_rows(x: jax.Array, cp_size: int, cp_rank) -> jax.Array:
    """The rows of one rank, `x[cp_rank::cp_size]`, for a rank that may be traced.

    Args:
      x: [n, ...] in chunk order, n divisible by cp_size.
      cp_size: number of ranks.
      cp_rank: int, or int32 scalar such as `lax.axis_index(cp_axis)`.

    Returns:
      [n / cp_size, ...].
    """
    return lax.dynamic_index_in_dim(
        x.reshape(x.shape[0] // cp_size, cp_size, *x.shape[1:]), cp_rank, axis=1, keepdims=False
    )


def query_start_loc(extend_lens: jax.Array, cp_size: int, cp_rank) -> jax.Array:
    """First local row of every request on a rank, and the end of the last one.

    A request that fills chunk rows a .. b-1 has the local rows ceil((a - r) / cp_size) .. ceil((b - r) / cp_size) - 1
    of rank r; the differences are the request's `query_lens`.

    Args:
      extend_lens: [num_reqs] int32 new tokens per request, in chunk order.
      cp_size: number of ranks.
      cp_rank: int or int32 scalar.

    Returns:
      [num_reqs + 1] int32.

    Raises:
      ValueError: a wrong shape or dtype, or a rank outside 0..cp_size - 1 that is not traced.
    """
    check_array("extend_lens", extend_lens, jnp.int32, num_reqs=None)
    cp_size = check_int("cp_size", cp_size)
    if isinstance(cp_rank, jax.Array):
        check_array("cp_rank", cp_rank, jnp.int32)
    elif check_int("cp_rank", cp_rank, 0) >= cp_size:
        raise ValueError(f"`cp_rank` must be in 0..{cp_size - 1}, got {cp_rank}.")
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(extend_lens, dtype=jnp.int32)])
    return jnp.maximum(ends - cp_rank + cp_size - 1, 0) // cp_size
