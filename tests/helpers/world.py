"""A small world for prefill tests: requests with known KV rows, pools and maps in random order, poison everywhere else.

The rows are known by (request, position) and (request, entry). The pools hold them at scattered slots, and every byte that
belongs to no row is 0xFF (NaN as a value): all of page 0, so that a slot clamped to 0 shows, slack, pad bytes, free pages. `oracle` computes attention in float64 from the known rows, without any slot.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dsa_cp_jax import (
    DSAConfig,
    KVPool,
    PrefillChunk,
    dsa_prefill_attention,
    make_plan,
    merge_round_robin,
    split_round_robin,
    write_kv,
)
from dsa_cp_jax.config import LAYER_KINDS
from pallas_kernels import KVLayout, quantize_rows
from pallas_kernels.kv_rows import dequantize_rows
from tests.helpers.oracles import attention

CONFIG = DSAConfig(h_q=2, topk=16, swa_page_size=16, c4_page_size=8, c128_page_size=2)
plan_of = jax.jit(make_plan, static_argnames=("config", "cp_size", "gate"))


def traced_once(f):
    """`f`, refusing to be traced a second time. jit it."""
    traces = []

    @functools.wraps(f)
    def counted(*args, **kwargs):
        traces.append(args)
        assert len(traces) == 1, "traced again"
        return f(*args, **kwargs)

    return counted


def cpu_mesh(shape=(4,), names=("cp",), axis_types=None, reverse=False) -> Mesh:
    """A mesh of virtual CPU devices."""
    devices = jax.devices("cpu")[: int(np.prod(shape))]
    return Mesh(np.array(devices[::-1] if reverse else devices).reshape(shape), names, axis_types=axis_types)


@functools.cache
def entry(kind, cp, path="auto", capacity=48, dtype=np.float32):
    """The sharded entry under jit, chunk order in and out: one trace for all lengths of a capacity and dtype."""
    mesh = cpu_mesh((cp,))

    @jax.jit
    @traced_once
    def run(q, plan, swa_pool, compressed_pool, topk, sink):
        topk = None if topk is None else split_round_robin(topk, cp)
        args = (split_round_robin(q, cp), plan, swa_pool, compressed_pool, topk, sink)
        out = dsa_prefill_attention(*args, kind=kind, config=CONFIG, mesh=mesh, path=path)
        return merge_round_robin(out, cp, q.shape[0])

    return run


@dataclasses.dataclass
class World:
    """`pools`, maps and the truth. Request i owns row pool_rows[i] of req_to_token."""

    config: DSAConfig
    swa_rows: np.ndarray  # [R, max_len, d] float32, as dequantised
    entry_rows: dict[str, np.ndarray]  # kind -> [R, entries, d]
    pools: dict[str, KVPool]  # "c0" is the SWA pool
    pool_rows: np.ndarray
    req_to_token: np.ndarray
    full_to_swa: np.ndarray
    page_tables: dict[int, np.ndarray]
    sink: jax.Array
    token_capacity: int = 48

    @classmethod
    def build(cls, rng, *, num_reqs=3, max_len=640, layout=KVLayout.V4, config=CONFIG, token_capacity=48):
        def rows(*shape):
            x = jnp.asarray(rng.standard_normal((*shape, config.d_qk)), jnp.float32)
            return np.asarray(dequantize_rows(quantize_rows(x, layout=layout), layout=layout), np.float32)

        def pool(num_pages, page_size, slots, values):
            empty = KVPool.zeros(num_pages, layout=layout, page_size=page_size)
            empty = dataclasses.replace(empty, pages=jnp.full_like(empty.pages, 0xFF))
            return write_kv(
                empty, jnp.asarray(slots.reshape(-1), jnp.int32), jnp.asarray(values).reshape(-1, config.d_qk)
            )

        swa_rows = rows(num_reqs, max_len)
        full_slots = 2 * num_reqs * max_len
        req_to_token = rng.permutation(full_slots)[: (num_reqs + 1) * max_len].reshape(num_reqs + 1, max_len)
        pool_rows = rng.permutation(num_reqs + 1)[:num_reqs]
        swa_pages = 1 - -full_slots // config.swa_page_size
        full_to_swa = config.swa_page_size + rng.permutation(full_slots)
        pools = {"c0": pool(swa_pages, config.swa_page_size, full_to_swa[req_to_token[pool_rows]], swa_rows)}
        entry_rows, tables = {}, {}
        for kind in ("c4", "c128"):
            ratio, page_size = LAYER_KINDS[kind], config.compressed_page_size(kind)
            entries = max_len // ratio
            used = -(-entries // page_size)
            table = 1 + rng.permutation(2 * num_reqs * used - 1)[: num_reqs * used].reshape(num_reqs, used)
            entry_rows[kind] = rows(num_reqs, entries)
            e = np.arange(entries)
            slots = table[:, e // page_size] * page_size + e % page_size
            pools[kind] = pool(2 * num_reqs * used, page_size, slots, entry_rows[kind])
            rubbish = np.full((num_reqs, 1), 2**31 - 1)  # a table wider than anybody uses
            tables[ratio] = np.concatenate([table, rubbish], 1)
        sink = jnp.asarray(rng.standard_normal(config.h_q), jnp.float32)
        return cls(
            config, swa_rows, entry_rows, pools, pool_rows, req_to_token, full_to_swa, tables, sink, token_capacity
        )

    def chunk(self, seq_lens, extend_lens, cp_size, /, **kwargs) -> PrefillChunk:
        """Requests 0, 1, ... with these lengths; unused request slots hold rubbish."""
        size, live = len(self.pool_rows), len(seq_lens)
        pad = [7] * (size - live)
        kwargs = dict(
            seq_lens=[*seq_lens, *pad], extend_lens=[*extend_lens, *pad], req_pool_indices=self.pool_rows,
            req_to_token=self.req_to_token, full_to_swa=self.full_to_swa, page_tables=self.page_tables,
            token_capacity=self.token_capacity, cp_size=cp_size, num_reqs=live,
        ) | kwargs  # fmt: skip
        return PrefillChunk.build(**kwargs)

    def queries(self, rng, seq_lens, extend_lens, dtype=np.float32):
        """Chunk-order q [token_capacity, h_q, d], topk [token_capacity, topk] with holes, and each row's (req, pos)."""
        q = rng.standard_normal((self.token_capacity, self.config.h_q, self.config.d_qk)).astype(dtype)
        where = [(i, s - e + j) for i, (s, e) in enumerate(zip(seq_lens, extend_lens)) for j in range(e)]
        topk = np.full((self.token_capacity, self.config.topk), 5, np.int32)  # rubbish in slack rows
        for g, (_, pos) in enumerate(where):
            n = (pos + 1) // 4
            chosen = rng.permutation(n)[: self.config.topk]
            topk[g] = np.pad(chosen, (0, self.config.topk - len(chosen)), constant_values=-1)
            if len(chosen) == self.config.topk:
                topk[g, rng.integers(self.config.topk)] = -1
        return jnp.asarray(q), jnp.asarray(topk), where

    def arguments(self, kind: str, topk):
        """swa_pool, compressed_pool, topk_indices, attn_sink for an entry."""
        return self.pools["c0"], None if kind == "c0" else self.pools[kind], topk if kind == "c4" else None, self.sink

    def oracle(self, kind: str, q, topk, where, *, absolute=False) -> np.ndarray:
        """[token_capacity, h_q, d_v] float64; 0 in slack rows. With `absolute`, the values' magnitudes are weighted."""
        window, out = self.config.swa_window, np.zeros((*q.shape[:2], self.config.d_v))
        for g, (req, pos) in enumerate(where):
            keys = list(self.swa_rows[req, max(0, pos - window + 1) : pos + 1])
            if kind == "c4":
                n = min((pos + 1) // 4, self.config.topk)
                keys += [self.entry_rows[kind][req, e] for e in np.asarray(topk[g, :n]) if e >= 0]
            if kind == "c128":
                keys += list(self.entry_rows[kind][req, : (pos + 1) // 128])
            out[g] = attention(q[g], keys, self.config.sm_scale, self.sink, absolute=absolute)[0]
        return out
