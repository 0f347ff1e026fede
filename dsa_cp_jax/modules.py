"""The DeepSeek-V4 attention block in flax.nnx, around `dsa_prefill_attention_local`.

    x (rank-local rows) --> q_latent --> q, RoPE ----------------------------------------> attention --> inverse RoPE,
      |                       '--> indexer (c4): score the keys, top-k --> topk_indices -----^  ^         output
      '--> kv, RoPE, FP8 records; compressor values and gates                                   |         projection
              '-- all-gather over CP --> write: SWA pool, compressed entries, keys, ring -------'

Rows, and so everything but what is written, are a rank's own; pools, keys and rings are the same on every rank. They
are arguments and results (`LayerCache`): donate them under jit.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from dsa_cp_jax.attention import check_cp, dsa_prefill_attention_local
from dsa_cp_jax.chunk import ChunkPlan
from dsa_cp_jax.compressor import Compressor, Indexer, closing_entries
from dsa_cp_jax.config import DSAConfig, compress_ratio
from dsa_cp_jax.kv_cache import KVPool, write_kv
from dsa_cp_jax.layers import RMSNorm, apply_rope, rms_normalize, rope_angles, rope_frequencies
from dsa_cp_jax.round_robin import rank_rows
from pallas_kernels import KVLayout, quantize_rows
from pallas_kernels.common import check_array, check_int, check_type


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedCache:
    """Compressed entries, or their keys for the indexer, and the tokens that the next ones will be pooled from.

    Attributes:
      entries: the pool of compressed entries; of the indexer: [slots of that pool, index_head_dim], an entry's key in
        the entry's slot.
      state: [state rows, span, 2, series, d], the ring of the compressor.
    """

    entries: Any
    state: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """What a layer remembers from chunk to chunk. Replicated over the CP axis.

    The rings hold the last tokens that a request had here, so a request must begin at position 0 in its own row of
    req_to_token: a prefix that another request computed may be shared only up to a multiple of the compress ratio for
    c128, and not at all for c4, whose windows overlap, unless the caller copies that request's ring rows as well.

    Attributes:
      swa: the SWA pool.
      compressed: entries (a KVPool) and ring of the compressor (c4, c128), else None.
      index: keys (an array) and ring of the indexer (c4), else None.
    """

    swa: KVPool
    compressed: CompressedCache | None = None
    index: CompressedCache | None = None


def gather_rows(rows, cp_axis: str | None):
    """All-gathers rank-local rows [rows, ...] (a pytree of them) over the CP axis: [rows, cp, ...].

    Chunk row r + cp_size * k is (k, r), so flattening the first two axes (`in_chunk_order`) is the un-interleave.
    """
    return jax.tree.map(lambda x: x[:, None] if cp_axis is None else lax.all_gather(x, cp_axis, axis=1), rows)


def in_chunk_order(gathered):
    """[rows, cp, ...] of `gather_rows` -> [cp * rows, ...] in chunk order."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), gathered)


class DSAAttention(nnx.Module):
    """DeepSeek-V4 attention: sliding window, and compressed KV in c4 (CSA) and c128 (HCA) layers.

    q_latent = norm(x Wqa); q = RoPE(rms_normalize(q_latent Wqb) per head); kv = RoPE(norm(x Wkv)), K and V at once;
    o = attention with a sink per head; y = concat_g(RoPE^-1(o)_g Woa_g) Wob over groups g of heads.
    """

    def __init__(self, config: DSAConfig, kind: str, *, param_dtype=jnp.float32, rngs: nnx.Rngs):
        """Makes a block.

        Args:
          config: the model's DSAConfig.
          kind: "c0", "c4" or "c128".
          param_dtype: dtype of the projections, and what x is to be.
          rngs: for the initial parameters.

        Raises:
          ValueError: an unknown kind, groups that do not divide the heads, or widths that do not fit.
        """
        check_type("config", config, DSAConfig)
        check_type("rngs", rngs, nnx.Rngs)
        if config.h_q % config.o_groups:
            raise ValueError(f"`o_groups` must divide h_q={config.h_q}, got {config.o_groups}.")
        if config.d_v != config.d_qk:
            raise ValueError(f"`d_v` must be d_qk={config.d_qk} (K and V are the same row), got {config.d_v}.")
        if config.d_rope > config.index_head_dim:
            raise ValueError(f"`index_head_dim` must be >= d_rope={config.d_rope}, got {config.index_head_dim}.")
        self.config, self.kind = config, kind
        self.frequencies = tuple(rope_frequencies(config, kind).tolist())
        hidden, eps = config.hidden_size, config.norm_eps
        linear = dict(use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.q_a_proj = nnx.Linear(hidden, config.q_lora_rank, **linear)
        self.q_a_norm = RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = nnx.Linear(config.q_lora_rank, config.h_q * config.d_qk, **linear)
        self.kv_proj = nnx.Linear(hidden, config.d_qk, **linear)
        self.kv_norm = RMSNorm(config.d_qk, eps)
        self.sinks = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (config.h_q,), jnp.float32))
        group = config.h_q // config.o_groups * config.d_v
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.o_a_proj = nnx.Param(init(rngs.params(), (config.o_groups, group, config.o_lora_rank), param_dtype))
        self.o_b_proj = nnx.Linear(config.o_groups * config.o_lora_rank, hidden, **linear)
        if compress_ratio(kind):
            self.compressor = Compressor(config, kind, config.d_qk, param_dtype=param_dtype, rngs=rngs)
        if kind == "c4":
            self.indexer = Indexer(config, param_dtype=param_dtype, rngs=rngs)

    def init_cache(
        self, *, layout: KVLayout, swa_pages: int, compressed_pages: int, state_rows: int, dtype=jnp.float32
    ) -> LayerCache:
        """An empty cache.

        Args:
          layout: of both pools.
          swa_pages, compressed_pages: pages of the pools; the latter is unused in c0 layers.
          state_rows: requests that may be under way at a time: the rows of req_to_token.
          dtype: of the indexer's keys and the rings.

        Raises:
          ValueError: as `KVPool.zeros`, or a layout whose rows are not d_qk wide.
        """
        check_int("state_rows", state_rows)
        if isinstance(layout, KVLayout) and layout.d != self.config.d_qk:
            raise ValueError(f"`layout` must have rows of d_qk={self.config.d_qk} values, got {layout!r}.")
        swa = KVPool.zeros(swa_pages, layout=layout, page_size=self.config.swa_page_size)
        if not compress_ratio(self.kind):
            return LayerCache(swa=swa)
        page_size = self.config.compressed_page_size(self.kind)
        pool = KVPool.zeros(compressed_pages, layout=layout, page_size=page_size)
        compressed = CompressedCache(entries=pool, state=self.compressor.init_state(state_rows, dtype))
        if self.kind != "c4":
            return LayerCache(swa=swa, compressed=compressed)
        keys = jnp.zeros((pool.num_slots, self.config.index_head_dim), dtype)
        index = CompressedCache(entries=keys, state=self.indexer.compressor.init_state(state_rows, dtype))
        return LayerCache(swa=swa, compressed=compressed, index=index)

    def _check_cache(self, cache, requests: int) -> None:
        """ValueError unless the cache is one of this block's `init_cache`, with state for so many requests."""
        check_type("cache", cache, LayerCache)
        parts = [
            ("compressed", cache.compressed, self.compressor if compress_ratio(self.kind) else None),
            ("index", cache.index, self.indexer.compressor if self.kind == "c4" else None),
        ]
        for name, part, compressor in parts:
            if (part is None) != (compressor is None):
                came = "None" if part is None else "given"
                raise ValueError(f"`cache` must be of a {self.kind} block (`init_cache`), its `{name}` is {came}.")
            if part is None or compressor is None:
                continue
            wanted = jax.eval_shape(lambda c=compressor: c.init_state(requests, jnp.float32)).shape
            if part.state.shape[1:] != wanted[1:]:
                raise ValueError(
                    f"`cache` must be of a {self.kind} block (`init_cache`), the ring of its `{name}` has shape "
                    f"{part.state.shape}, not [state rows, {', '.join(map(str, wanted[1:]))}]."
                )
            if part.state.shape[0] < requests:
                raise ValueError(
                    f"`cache` must have state_rows={requests} or more (rows of req_to_token), got "
                    f"{part.state.shape[0]}."
                )

    def rows_to_share(self, x, angles, layout: KVLayout) -> dict[str, jax.Array]:
        """What every rank must have of these rows. Nothing else is communicated.

        Args:
          x: [rows, hidden_size], this rank's rows.
          angles: [rows, d_rope / 2], their RoPE angles.
          layout: of the pools, which store what travels as KV.

        Returns:
          [rows, ...] each: `kv`, records of `layout`; `compressor` and `indexer`, values and gates of
          `Compressor.project`, in the layers that have them.
        """
        rows = dict(kv=quantize_rows(apply_rope(self.kv_norm(self.kv_proj(x)), angles), layout=layout))
        if compress_ratio(self.kind):
            rows["compressor"] = self.compressor.project(x)
        if self.kind == "c4":
            rows["indexer"] = self.indexer.compressor.project(x)
        return rows

    def write(self, chunk_rows: dict[str, jax.Array], plan: ChunkPlan, cache: LayerCache) -> LayerCache:
        """The cache with the chunk's KV, and the compressed entries and keys that it completes.

        Args:
          chunk_rows: `rows_to_share` of the whole chunk, in chunk order.
          plan: the chunk's plan.
          cache: what came before.
        """
        swa = write_kv(cache.swa, plan.chunk.swa_slots(plan.query_req, plan.query_pos), chunk_rows["kv"])
        if cache.compressed is None:
            return LayerCache(swa=swa)
        pool = cache.compressed.entries
        slots = plan.chunk.compressed_slots(self.kind, pool.page_size, *closing_entries(plan, self.kind))
        entries, state = self.compressor(chunk_rows["compressor"], cache.compressed.state, plan)
        compressed = CompressedCache(entries=write_kv(pool, slots, entries), state=state)
        if cache.index is None:
            return LayerCache(swa=swa, compressed=compressed)
        new, state = self.indexer.compressor(chunk_rows["indexer"], cache.index.state, plan)
        keys = cache.index.entries
        at = jnp.where(slots >= 0, slots, len(keys) + jnp.arange(len(slots), dtype=jnp.int32))
        keys = keys.at[at].set(new.astype(keys.dtype), mode="drop", unique_indices=True)
        return LayerCache(swa=swa, compressed=compressed, index=CompressedCache(entries=keys, state=state))

    def __call__(
        self, x: jax.Array, plan: ChunkPlan, cache: LayerCache, *,
        cp_axis: str | None = "cp", path: str = "auto", attend: Callable = dsa_prefill_attention_local,
        implementation=None, interpret=False,
    ) -> tuple[jax.Array, LayerCache]:  # fmt: skip
        """Runs the block over a chunk, for one rank, inside a shard_map such as `shard_over_cp`'s.

        Args:
          x: [token_capacity / cp_size, hidden_size], this rank's rows: local row k is chunk row cp_rank + cp_size * k.
          plan: from `make_plan`, replicated.
          cache: from `init_cache` or from the chunk before, replicated.
          cp_axis: manual mesh axis of the ranks; None: no context parallelism, no shard_map needed.
          path: "auto", "sparse" or "dense"; a stack of blocks should take the gate once around itself, see
            `dsa_prefill_attention`.
          attend: the attention; its arguments are those of `dsa_prefill_attention_local`.
          implementation, interpret: passed to it.

        Returns:
          [token_capacity / cp_size, hidden_size] in x's dtype, unspecified in padding and slack rows; the new cache.

        Raises:
          ValueError: as `dsa_prefill_attention`; an x of another shape, a cache with too few state rows.
        """
        config = self.config
        cp_rank = check_cp(plan, cp_axis)
        rows = plan.token_capacity // plan.cp_size
        check_array("x", x, (jnp.bfloat16, jnp.float32), rows=rows, hidden_size=config.hidden_size)
        ratio = compress_ratio(self.kind)
        if ratio and self.kind not in plan.compressed:
            raise ValueError(
                f"`plan` must be made from page_tables[{ratio}] for a {self.kind} block, its chunk has none."
            )
        self._check_cache(cache, plan.chunk.req_to_token.shape[0])
        query_pos, query_req = (rank_rows(y, plan.cp_size, cp_rank) for y in (plan.query_pos, plan.query_req))
        angles = rope_angles(query_pos, self.frequencies)
        with jax.named_scope("gather_chunk"):
            gathered = gather_rows(self.rows_to_share(x, angles, cache.swa.layout), cp_axis)
        q_latent = self.q_a_norm(self.q_a_proj(x))
        q = self.q_b_proj(q_latent).reshape(rows, config.h_q, config.d_qk)
        q = apply_rope(rms_normalize(q, config.norm_eps), angles)
        # Nothing that came is read before the queries are made: the exchange runs meanwhile.
        gathered, q = lax.optimization_barrier((gathered, q))
        cache = self.write(in_chunk_order(gathered), plan, cache)
        topk_indices = None
        if cache.index is not None:
            with jax.named_scope("indexer"):
                topk_indices = self.indexer(x, q_latent, angles, query_pos, query_req, plan, cache.index.entries)
        pool = None if cache.compressed is None else cache.compressed.entries
        out = attend(
            q, plan, cache.swa, pool, topk_indices, self.sinks[...], kind=self.kind, config=config,
            cp_axis=cp_axis, path=path, implementation=implementation, interpret=interpret,
        )  # fmt: skip
        out = apply_rope(out, -angles).reshape(rows, config.o_groups, -1)
        out = jnp.einsum("rgi,gil->rgl", out, self.o_a_proj[...])
        return self.o_b_proj(out.reshape(rows, -1)), cache


def shard_over_cp(fn: Callable, mesh: Mesh, cp_axis: str = "cp") -> Callable:
    """Wraps a rank-local `fn(module, rows, plan, cache) -> (rows, *replicated)` in a shard_map over `mesh`.

    Args:
      fn: rank-local function, such as a `DSAAttention` call with `cp_axis` bound.
      mesh: the mesh; all of its axes become manual.
      cp_axis: axis of the ranks.

    Returns:
      The same function of global arrays: rows P(cp_axis) in rank order (`split_round_robin`), all else P().
    """
    P = PartitionSpec

    def local(*args):
        rows, *replicated = fn(*args)
        return rows, tuple(replicated)

    # The caches are written from all-gathered rows. They are equal on every rank, but the types of check_vma cannot say
    # so: an all_gather's result counts as varying. This is the one place that turns the check off.
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(cp_axis), P(), P()), out_specs=(P(cp_axis), P()), check_vma=False
    )

    def call(module, rows, plan, cache):
        rows, replicated = sharded(module, rows, plan, cache)
        return rows, *replicated

    return call
