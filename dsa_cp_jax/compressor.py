"""Compressed KV: softmax-gated pooling of windows of tokens, and the lightning indexer that selects among the entries.

A compressor runs over the whole chunk in chunk order, on every rank alike. Tokens of a window that is not full yet
wait in a ring, `[state rows, span, ...]`: one row for each request (its row in req_to_token), the token of position p
in place p % span. A c128 window spans its own 128 tokens; a c4 window its own 4 and the 4 before them.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from dsa_cp_jax.chunk import ChunkPlan, spread_rows, visible_entries
from dsa_cp_jax.config import DSAConfig, compress_ratio
from dsa_cp_jax.layers import RMSNorm, apply_rope, rope_angles, rope_frequencies


def closing_entries(plan: ChunkPlan, kind: str) -> tuple[jax.Array, jax.Array]:
    """The compressed entries whose last token is in the chunk.

    Args:
      plan: the chunk's plan.
      kind: "c4" or "c128".

    Returns:
      Request and request-local entry, [token_capacity // ratio + R] int32 each; request -1 and entry 0 past the last.
    """
    chunk, ratio = plan.chunk, compress_ratio(kind)
    live = lax.iota(jnp.int32, chunk.seq_lens.shape[0]) < chunk.num_reqs
    seq_lens, extend_lens = jnp.where(live, chunk.seq_lens, 0), jnp.where(live, chunk.extend_lens, 0)
    first = (seq_lens - extend_lens) // ratio
    req, row, _ = spread_rows(seq_lens // ratio - first, plan.token_capacity // ratio + live.shape[0])
    return req, jnp.where(req >= 0, first[req] + row, 0)


class Compressor(nnx.Module):
    """Pools windows of tokens into compressed KV entries (CSA: c4, HCA: c128), or into the keys of the indexer.

    Token j of a window has a value and a gate per dimension, and

        entry = RoPE(norm(sum_j softmax_j(gate_j + bias_j) value_j))

    with the softmax over the window's tokens, for each dimension alone, and RoPE at the position of the window's first
    token. In c4 layers a token has two values and gates: for its own window, and for the next (so windows overlap).
    """

    def __init__(self, config: DSAConfig, kind: str, d: int, *, param_dtype, rngs: nnx.Rngs):
        """Makes a compressor to entries of width d.

        Args:
          config: the model's DSAConfig.
          kind: "c4" or "c128".
          d: width of an entry.
          param_dtype: dtype of the projections.
          rngs: for the initial parameters.
        """
        self.kind, self.ratio, self.d = kind, compress_ratio(kind), d
        self.series = 2 if kind == "c4" else 1
        width = self.series * d
        linear = dict(use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.kv_proj = nnx.Linear(config.hidden_size, width, **linear)
        self.gate_proj = nnx.Linear(config.hidden_size, width, **linear)
        self.position_bias = nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), (self.ratio, width), jnp.float32))
        self.kv_norm = RMSNorm(d, config.norm_eps)
        self.frequencies = tuple(rope_frequencies(config, kind).tolist())

    @property
    def span(self) -> int:
        """Tokens that an entry is pooled from."""
        return self.series * self.ratio

    def init_state(self, state_rows: int, dtype) -> jax.Array:
        """The empty ring [state_rows, span, 2, series, d]; nothing in it is read before it is written."""
        return jnp.zeros((state_rows, self.span, 2, self.series, self.d), dtype)

    def project(self, x: jax.Array) -> jax.Array:
        """Values and gates [rows, 2, series, d] of tokens x [rows, hidden_size]; row by row, so rank-local."""
        return jnp.stack([self.kv_proj(x), self.gate_proj(x)], axis=1).reshape(-1, 2, self.series, self.d)

    def __call__(self, inputs: jax.Array, state: jax.Array, plan: ChunkPlan) -> tuple[jax.Array, jax.Array]:
        """Pools the entries that the chunk completes.

        Args:
          inputs: [token_capacity, 2, series, d], `project` of the whole chunk in chunk order.
          state: [state rows, span, 2, series, d], what earlier chunks left.
          plan: the chunk's plan.

        Returns:
          entries [token_capacity // ratio + R, d] float32, in the order of `closing_entries`, and the new state.
        """
        chunk = plan.chunk
        req, entry = closing_entries(plan, self.kind)
        prefix_lens = chunk.seq_lens - chunk.extend_lens
        row_start = jnp.cumsum(chunk.extend_lens) - chunk.extend_lens
        bias = self.position_bias[...].reshape(self.ratio, self.series, self.d)

        def tokens(series: int):
            """Values, gates [entries, ratio, d] of the window (of the one before it, if an earlier series)."""
            pos = (entry - (self.series - 1 - series))[:, None] * self.ratio + jnp.arange(self.ratio, dtype=jnp.int32)
            new = pos - prefix_lens[req][:, None]
            fresh = inputs[:, :, series].at[row_start[req][:, None] + new].get(mode="clip")
            old = state[chunk.req_pool_indices[req][:, None], pos % self.span, :, series]
            value, gate = jnp.moveaxis(jnp.where((new >= 0)[..., None, None], fresh, old).astype(jnp.float32), 2, 0)
            there = (pos >= 0)[..., None]  # entry 0 has no window before it
            return jnp.where(there, value, 0), jnp.where(there, gate + bias[:, series], -jnp.inf)

        values, gates = (jnp.concatenate(parts, axis=1) for parts in zip(*map(tokens, range(self.series))))
        pooled = self.kv_norm((values * jax.nn.softmax(gates, axis=1)).sum(1))
        angles = rope_angles(entry * self.ratio, self.frequencies)

        # The last position of each request that belongs to each place of its ring; older ones stay.
        last = chunk.seq_lens[:, None] - 1
        pos = last - (last - jnp.arange(self.span, dtype=jnp.int32)) % self.span
        new = pos - prefix_lens[:, None]
        rings = chunk.req_pool_indices
        fresh = inputs.at[row_start[:, None] + new].get(mode="clip").astype(state.dtype)
        kept = jnp.where((new >= 0)[..., None, None, None], fresh, state[rings])
        reqs = jnp.arange(len(rings), dtype=jnp.int32)
        has_new = (reqs < chunk.num_reqs) & (chunk.extend_lens > 0)
        rings = jnp.where(has_new, rings, state.shape[0] + reqs)
        return apply_rope(pooled, angles), state.at[rings].set(kept, mode="drop", unique_indices=True)


class Indexer(nnx.Module):
    """Lightning indexer of a c4 layer: selects the compressed entries that a query attends to.

    score(t, e) = sum_h w[t, h] * relu(q[t, h] . k[e]) over the entries e < (pos + 1) // 4 of the query's request, w
    scaled by (index_heads * index_head_dim)^-0.5; the topk highest are selected, the lowest entry wins a tie.
    """

    def __init__(self, config: DSAConfig, *, param_dtype, rngs: nnx.Rngs):
        """Makes an indexer.

        Args:
          config: the model's DSAConfig.
          param_dtype: dtype of the projections.
          rngs: for the initial parameters.
        """
        self.heads, self.d, self.topk = config.index_heads, config.index_head_dim, config.topk
        linear = dict(use_bias=False, param_dtype=param_dtype, rngs=rngs)
        self.compressor = Compressor(config, "c4", self.d, param_dtype=param_dtype, rngs=rngs)
        self.q_b_proj = nnx.Linear(config.q_lora_rank, self.heads * self.d, **linear)
        self.weights_proj = nnx.Linear(config.hidden_size, self.heads, **linear)

    def __call__(self, x, q_latent, angles, query_pos, query_req, plan: ChunkPlan, keys) -> jax.Array:
        """Selects the entries of this rank's rows.

        Args:
          x: [rows, hidden_size].
          q_latent: [rows, q_lora_rank].
          angles: [rows, d_rope / 2], RoPE angles of the rows.
          query_pos, query_req: [rows] int32, as in `ChunkPlan`.
          plan: the chunk's plan.
          keys: [slots of the c4 pool, index_head_dim], an entry's key in its entry's slot; the chunk's own are written.

        Returns:
          [rows, min(topk, capacity of the compressed region)] int32 request-local entries, -1 where there is none. With
          plan.overflow, entries past that capacity are not among them.
        """
        region = plan.compressed["c4"]
        keys = keys.at[region.slots].get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(jnp.float32)
        q = apply_rope(self.q_b_proj(q_latent).reshape(-1, self.heads, self.d), angles).astype(jnp.float32)
        weights = self.weights_proj(x).astype(jnp.float32) * (self.heads * self.d) ** -0.5

        def add_head(scores, head):  # head by head: [rows, heads, entries] would not fit at real sizes
            q, weight = head
            logits = jnp.einsum("rd,ed->re", q, keys, precision=lax.Precision.HIGHEST)
            return scores + weight[:, None] * jax.nn.relu(logits), None

        scores = jnp.zeros_like(q, shape=(q.shape[0], keys.shape[0]))
        scores, _ = lax.scan(add_head, scores, (q.swapaxes(0, 1), weights.T))

        base = region.base.at[query_req].get(mode="fill", fill_value=0, wrap_negative_indices=False)[:, None]
        entry = jnp.arange(keys.shape[0], dtype=jnp.int32) - base
        visible = jnp.where(query_req >= 0, visible_entries(query_pos, "c4"), 0)[:, None]
        scores = jnp.where((entry >= 0) & (entry < visible) & (region.slots >= 0), scores, -jnp.inf)
        best, column = lax.top_k(scores, min(self.topk, keys.shape[0]))
        return jnp.where(best > -jnp.inf, column - base, -1)
