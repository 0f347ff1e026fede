"""Plain-Pallas stand-ins of `mosaic.Hopper` for the GPU interpreter on CPU, under the same names."""
# ruff: noqa: D102  (the docstrings are those of mosaic.Hopper)

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import CHUNK, ROWS


class Interpreted:
    """See `mosaic.Hopper`. Tokens are (128,) arrays in natural order, rows to copy (64,) arrays."""

    class _Accumulator:
        def __init__(self, value):
            self.value = value

    class _Transposed:
        def __init__(self, ref):
            self.ref = ref

    @staticmethod
    def wgmma(acc, a, b):
        a = a if isinstance(a, jax.Array) else a[...]
        b = b.ref[...].T if isinstance(b, Interpreted._Transposed) else b[...]
        acc.value = acc.value + jnp.dot(a, b, preferred_element_type=jnp.float32)

    @staticmethod
    def wgmma_wait(n):
        pass

    @staticmethod
    def transpose(ref):
        return Interpreted._Transposed(ref)

    @staticmethod
    def accumulate(body, *init):
        accs = tuple(Interpreted._Accumulator(x) for x in init)
        body(accs)
        return tuple(acc.value for acc in accs)

    @staticmethod
    def fence():
        pass

    @staticmethod
    def hidden_zero(ref):
        return jnp.int32(0)

    @staticmethod
    def barrier_words(n):
        return 0

    @staticmethod
    def barrier_scratch(n):
        return plgpu.Barrier(num_barriers=n)

    @staticmethod
    def open_barriers(barriers, n, landing):
        pass

    @staticmethod
    def arrive(barriers, k):
        plgpu.barrier_arrive(barriers.at[k])

    @staticmethod
    def wait(barriers, k, parity):
        plgpu.barrier_wait(barriers.at[k])

    @staticmethod
    def quad_sums(values):
        return values.sum(axis=1)

    @staticmethod
    def sum_quads(partial):
        return partial

    @staticmethod
    def any_differs(a, b):
        return jnp.any(a != b).astype(jnp.int32)

    @staticmethod
    def load_scalar(ref, i):
        return ref[i]

    @staticmethod
    def share(scratch_ref, lengths_refs, most, extra, part, parts):
        rounds = [
            lax.div((n if ref is None else jnp.clip(ref[...], 0, n)) + 2 * ROWS - 1, 2 * ROWS)
            for ref, n in zip(lengths_refs, most)
        ]
        work = jnp.maximum(sum(rounds), 1) + extra
        position = (jnp.cumsum(work) - work) * parts
        return tuple(jnp.sum(position < bound * work.sum(), dtype=jnp.int32) for bound in (part, part + 1))

    @staticmethod
    def load_tokens(indices_ref, row, first, limit):
        columns = first + lax.iota(jnp.int32, 2 * ROWS)
        values = indices_ref[row, :]
        return jnp.where(columns < limit, values[jnp.minimum(columns, values.shape[0] - 1)], -1)

    @staticmethod
    def consecutive_tokens(first, limit):
        rows = lax.iota(jnp.int32, 2 * ROWS)
        return jnp.where(rows < limit, first + rows, -1)

    @staticmethod
    def rows_to_copy(tokens, tile):
        return tokens[tile * ROWS : (tile + 1) * ROWS]

    @staticmethod
    def copy_rows(rows_ref, tokens, first_chunk, buffer, barriers, k, *, keep):
        inside = (tokens >= 0) & (tokens < rows_ref.shape[0])
        values = rows_ref[...][jnp.where(inside, tokens, 0)]
        start = first_chunk * CHUNK
        buffer[...] = jnp.where(inside[:, None], values[:, start : start + buffer.shape[-1]], 0)
        plgpu.barrier_arrive(barriers.at[k])

    @staticmethod
    def write_mask(mask_ref, tokens, n):
        mask_ref[...] = jnp.where((tokens >= 0) & (tokens < n), 0.0, -jnp.inf).astype(jnp.float32)

    @staticmethod
    def load_heads(heads_ref, head, h_q):
        return heads_ref[...][jnp.minimum(head + lax.iota(jnp.int32, ROWS), h_q - 1)]

    @staticmethod
    def _for_heads(head, h_q, store):
        """Calls `store(number of heads that exist)`, a static number."""
        if h_q >= ROWS:
            pl.when(head + ROWS <= h_q)(lambda: store(ROWS))
        if h_q % ROWS:
            pl.when(head + ROWS > h_q)(lambda: store(h_q % ROWS))

    @staticmethod
    def store_heads(values, out_ref, query, head, h_q):
        def store(n):
            out_ref[pl.ds(query * h_q + head, n)] = values[:n]

        Interpreted._for_heads(head, h_q, store)

    @staticmethod
    def store_rows(values, out_ref, query, head, h_q, column):
        def store(n):
            out_ref[pl.ds(query * h_q + head, n), pl.ds(column, values.shape[1])] = values[:n]

        Interpreted._for_heads(head, h_q, store)
