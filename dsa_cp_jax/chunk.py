"""PrefillChunk, what arrives, and ChunkPlan, what all layers of a chunk share: built once, immutable.

Ragged things are (static capacity, traced length): new lengths within a capacity do not recompile.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dsa_cp_jax.config import LAYER_KINDS, DSAConfig, compress_ratio
from dsa_cp_jax.gate import sparse_prefill_predicate
from pallas_kernels.common import check_array, check_int, check_type

INT32_MAX = np.iinfo(np.int32).max
MOST_TOKENS = 2**30
"""Of a chunk: rows are counted in int32."""


def _lookup(table: jax.Array, *index) -> jax.Array:
    """table[index], -1 outside the table."""
    if 0 in (*table.shape, *index[0].shape):  # also: XLA's CPU compiler crashes on such gathers inside shard_map
        return jnp.full(index[0].shape, -1, jnp.int32)
    return table.at[index].get(mode="fill", fill_value=-1, wrap_negative_indices=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """The new tokens of some requests, and where their KV lives. Make it with `build`, on the host.

    Attributes:
      num_reqs: [] int32, live requests; they come first in the arrays below.
      seq_lens: [R] int32, tokens of each request after this chunk; 0 in unused request slots.
      extend_lens: [R] int32, how many of them are new.
      req_pool_indices: [R] int32, row of req_to_token of each request.
      req_to_token: [pool rows, max_len] int32, position -> full slot.
      full_to_swa: [full slots] int32, full slot -> slot of the SWA pool.
      page_tables: {compress ratio: [R, pages] int32}, compressed page -> page of that ratio's pool.
      token_capacity: rows that the chunk's arrays have (static), >= sum(extend_lens).
      entry_capacities: ((compress ratio, entries), ...): workspace rows for the compressed entries of all requests
        together (static); a ratio that is not in it has room for all that its page table can name.
    """

    num_reqs: jax.Array
    seq_lens: jax.Array
    extend_lens: jax.Array
    req_pool_indices: jax.Array
    req_to_token: jax.Array
    full_to_swa: jax.Array
    page_tables: dict[int, jax.Array]
    token_capacity: int = dataclasses.field(metadata=dict(static=True))
    entry_capacities: tuple[tuple[int, int], ...] = dataclasses.field(default=(), metadata=dict(static=True))

    @classmethod
    def build(
        cls,
        *,
        seq_lens,
        extend_lens,
        req_pool_indices,
        req_to_token,
        full_to_swa,
        page_tables: Mapping[int, object],
        token_capacity: int,
        cp_size: int,
        num_reqs: int | None = None,
        entry_capacities: Mapping[int, int] | None = None,
    ) -> "PrefillChunk":
        """Checks a chunk on the host and makes it a pytree.

        Args:
          seq_lens, extend_lens, req_pool_indices: [R] integers; entries past num_reqs are unused and may hold anything.
          req_to_token: [pool rows, max_len] integers.
          full_to_swa: [full slots] integers, -1 where a full slot has no SWA slot (any more).
          page_tables: {4: [R, pages], 128: [R, pages]}, either or both; the unused part may hold anything.
          token_capacity: static row count, divisible by cp_size.
          cp_size: ranks that the rows will be split over.
          num_reqs: live requests, zero-length ones too; None: all R.
          entry_capacities: {compress ratio: entries} static room for the compressed entries (seq_len // ratio) of all
            requests together; by default all that the page table can name, R x pages x page size.

        Raises:
          ValueError: naming the argument: shapes that do not fit, lengths that are negative or inconsistent, more
            tokens than the capacity or a request's row holds, a position without a slot, two new tokens with the same
            one, two requests with new tokens in one row of req_to_token.
        """

        def integers(name: str, x, **dims) -> np.ndarray:
            try:
                x = np.asarray(x) if np.size(x) else np.zeros(np.shape(x), np.int32)
            except ValueError:
                raise ValueError(f"`{name}` must be an array of integers, got {x!r}.") from None
            check_array(name, x, (np.int32, np.int64), **dims)
            if x.size and (x.max() > INT32_MAX or x.min() < -INT32_MAX - 1):
                raise ValueError(f"`{name}` must fit into int32, got values {x.min()}..{x.max()}.")
            return x.astype(np.int32)

        seq_lens = integers("seq_lens", seq_lens, R=None)
        size = seq_lens.shape[0]
        if not size:
            raise ValueError(
                "`seq_lens` must have at least one request slot (num_reqs=0 says that none is live), got none."
            )
        if not isinstance(page_tables, Mapping):
            raise ValueError(f"`page_tables` must map compress ratios to tables, got {type(page_tables).__name__}.")
        extend_lens = integers("extend_lens", extend_lens, R=size)
        req_pool_indices = integers("req_pool_indices", req_pool_indices, R=size)
        req_to_token = integers("req_to_token", req_to_token, pool_rows=None, max_len=None)
        full_to_swa = integers("full_to_swa", full_to_swa, full_slots=None)
        tables = {}
        for ratio, table in page_tables.items():
            if ratio not in LAYER_KINDS.values() or not ratio:
                raise ValueError(f"`page_tables` must have compress ratios 4 or 128 as keys, got {ratio!r}.")
            tables[ratio] = integers(f"page_tables[{ratio}]", table, R=size, pages=None)
        num_reqs = size if num_reqs is None else check_int("num_reqs", num_reqs, 0)
        if num_reqs > size:
            raise ValueError(f"`num_reqs` must be in 0..R={size}, got {num_reqs}.")
        cp_size, token_capacity = check_int("cp_size", cp_size), check_int("token_capacity", token_capacity)
        if token_capacity % cp_size:
            raise ValueError(f"`token_capacity` must be a multiple of cp_size={cp_size}, got {token_capacity}.")
        if token_capacity > MOST_TOKENS:
            raise ValueError(f"`token_capacity` must be at most {MOST_TOKENS}, got {token_capacity}.")

        live = np.arange(size) < num_reqs
        seq_lens, extend_lens, req_pool_indices = (
            np.where(live, x, 0) for x in (seq_lens, extend_lens, req_pool_indices)
        )
        rows: dict[int, int] = {}
        new_slots = []
        for i in range(num_reqs):
            seq, extend, row = int(seq_lens[i]), int(extend_lens[i]), int(req_pool_indices[i])
            if seq < 0:
                raise ValueError(f"`seq_lens[{i}]` must be >= 0, got {seq}.")
            if not 0 <= extend <= seq:
                raise ValueError(f"`extend_lens[{i}]` must be in 0..seq_lens[{i}]={seq}, got {extend}.")
            if seq > req_to_token.shape[1]:
                raise ValueError(
                    f"`seq_lens[{i}]` must be <= max_len={req_to_token.shape[1]} (req_to_token), got {seq}."
                )
            if not 0 <= row < req_to_token.shape[0]:
                raise ValueError(f"`req_pool_indices[{i}]` must be in 0..{req_to_token.shape[0] - 1}, got {row}.")
            full = req_to_token[row, seq - extend : seq]
            bad = (full < 0) | (full >= full_to_swa.shape[0])
            if not bad.any():
                bad = full_to_swa[full] < 0
            if bad.any():
                pos = seq - extend + int(bad.argmax())
                raise ValueError(
                    f"`full_to_swa` must give a slot to every new token; request {i} has none at position {pos}."
                )
            if extend and (other := rows.setdefault(row, i)) != i:
                raise ValueError(f"`req_pool_indices[{i}]` must not be that of request {other}, got {row} for both.")
            new_slots.append(full_to_swa[full])
        slots = np.concatenate(new_slots or [np.zeros(0, np.int32)])
        order = np.argsort(slots, kind="stable")
        if (shared := np.flatnonzero(np.diff(slots[order]) == 0)).size:
            ends = np.cumsum(extend_lens)
            tokens = order[shared[0] : shared[0] + 2]
            requests = np.searchsorted(ends, tokens, side="right")
            pos = seq_lens[requests] - ends[requests] + tokens
            raise ValueError(
                f"`full_to_swa` must give every new token a slot of its own; position {pos[0]} of request {requests[0]}"
                f" and position {pos[1]} of request {requests[1]} share slot {slots[tokens[0]]}."
            )
        if not isinstance(entry_capacities, Mapping | None):
            raise ValueError(
                f"`entry_capacities` must map compress ratios to entries, got {type(entry_capacities).__name__}."
            )
        entry_capacities = dict(entry_capacities or {})
        for ratio, capacity in entry_capacities.items():
            if ratio not in tables:
                raise ValueError(f"`entry_capacities` must have keys of page_tables {[*tables]}, got {ratio!r}.")
            entries = int((seq_lens // ratio).sum())
            if check_int(f"entry_capacities[{ratio}]", capacity, 0) < entries:
                raise ValueError(
                    f"`entry_capacities[{ratio}]` must be >= the batch's {entries} entries, got {capacity}."
                )
        tokens = int(extend_lens.sum())
        if tokens > token_capacity:
            raise ValueError(f"`extend_lens` must sum to at most token_capacity={token_capacity}, got {tokens}.")
        return cls(
            num_reqs=jnp.int32(num_reqs),
            seq_lens=jnp.asarray(seq_lens),
            extend_lens=jnp.asarray(extend_lens),
            req_pool_indices=jnp.asarray(req_pool_indices),
            req_to_token=jnp.asarray(req_to_token),
            full_to_swa=jnp.asarray(full_to_swa),
            page_tables={r: jnp.asarray(t) for r, t in tables.items()},
            token_capacity=token_capacity,
            entry_capacities=tuple(sorted(entry_capacities.items())),
        )

    def swa_slots(self, req: jax.Array, pos: jax.Array) -> jax.Array:
        """Slots in the SWA pool of positions of requests (arrays of one shape); -1 where there is none."""
        return _lookup(self.full_to_swa, _lookup(self.req_to_token, _lookup(self.req_pool_indices, req), pos))

    def compressed_slots(self, kind: str, page_size: int, req: jax.Array, entry: jax.Array) -> jax.Array:
        """Slots in the compressed pool of layer kind `kind` of request-local entries; -1 where there is none."""
        page = _lookup(self.page_tables[compress_ratio(kind)], req, jnp.where(entry >= 0, entry // page_size, -1))
        mapped = (page >= 0) & (page <= INT32_MAX // page_size - 1)
        return jnp.where(mapped, page * page_size + entry % page_size, -1)


def visible_entries(pos: jax.Array, kind: str) -> jax.Array:
    """How many compressed entries a query at position `pos` may see: those whose last token is not after it."""
    return (pos + 1) // compress_ratio(kind)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkspaceRegion:
    """A part of the workspace: the slots that are gathered into it, request after request without gaps.

    Attributes:
      slots: [capacity] int32 pool slots, -1 past the live extent.
      base: [R] int32, first row of each request in the region.
      count: [] int32, live rows.
      complete: [] bool: the live rows fit into the capacity, and each of a request with new tokens has a slot.
    """

    slots: jax.Array
    base: jax.Array
    count: jax.Array
    complete: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkPlan:
    """What all layers of a chunk share. Replicated over every mesh axis; made by `make_plan`.

    Attributes:
      chunk: the chunk.
      num_tokens: [] int32, new tokens n.
      use_sparse: [] bool, the gate.
      overflow: [] bool, the chunk does not fit its capacities, or a key that a layer of some kind can see has no slot;
        such a chunk takes the dense path, which leaves that key out.
      query_pos: [token_capacity] int32 positions in chunk order, 0 in padding and slack rows.
      query_req: [token_capacity] int32 requests in chunk order, -1 in padding and slack rows.
      swa: the window region: positions swa_first_pos[i] .. seq_lens[i] - 1 of every request.
      swa_first_pos: [R] int32.
      compressed: {"c4": ..., "c128": ...}: the compressed region of each layer kind the chunk has a page table for,
        entries 0 .. seq_lens[i] // ratio - 1 of every request.
      config: what it was made with (static).
      cp_size: ranks (static).
    """

    chunk: PrefillChunk
    num_tokens: jax.Array
    use_sparse: jax.Array
    overflow: jax.Array
    query_pos: jax.Array
    query_req: jax.Array
    swa: WorkspaceRegion
    swa_first_pos: jax.Array
    compressed: dict[str, WorkspaceRegion]
    config: DSAConfig = dataclasses.field(metadata=dict(static=True))
    cp_size: int = dataclasses.field(metadata=dict(static=True))

    @property
    def token_capacity(self) -> int:
        """Rows of query_pos: live, padding and slack."""
        return self.chunk.token_capacity

    def max_entries(self, kind: str, page_size: int) -> int:
        """Compressed entries per request that the page table of `kind` has room for (static)."""
        return self.chunk.page_tables[compress_ratio(kind)].shape[1] * page_size


def spread_rows(lens: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of requests of the given lengths, one after another: (request or -1 [capacity], row in it, base [R])."""
    ends = jnp.cumsum(lens, dtype=jnp.int32)
    base = ends - lens
    row = lax.iota(jnp.int32, capacity)
    req = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    live = req < lens.shape[0]
    req = jnp.where(live, req, -1)
    return req, jnp.where(live, row - base[req], 0), base


def _region(lens: jax.Array, capacity: int, slots_of: Callable, has_new: jax.Array) -> WorkspaceRegion:
    req, row, base = spread_rows(lens, capacity)
    slots, count = jnp.where(req >= 0, slots_of(req, row), -1), lens.sum(dtype=jnp.int32)
    seen = (req >= 0) & has_new[req]
    complete = (count <= capacity) & (~seen | (slots >= 0)).all()
    return WorkspaceRegion(slots=slots, base=base, count=count, complete=complete)


def make_plan(chunk: PrefillChunk, config: DSAConfig, *, cp_size: int, gate: str = "seed") -> ChunkPlan:
    """Plans a chunk: positions, slots, bases, and the gate. Call it inside jit, once per chunk; every layer uses it.

    Static capacities: token_capacity rows, token_capacity + R (swa_window - 1) window rows, and for each page table
    chunk.entry_capacities, by default R x pages x page size entries (a multi-request server wants less). A chunk that
    does not fit overflows: it is dense.

    Args:
      chunk: from `PrefillChunk.build`.
      config: the model's DSAConfig.
      cp_size: ranks of the CP axis.
      gate: "seed" is the rule of `sparse_prefill_predicate` (with cp_size 1 there is no CP: any chunk is sparse).
        "wide" takes the sparse path for any chunk with a token: several requests, padding rows. The sparse path is
        right for those too, because each row carries its own request and position.

    Returns:
      ChunkPlan, to be replicated over all mesh axes.

    Raises:
      ValueError: token_capacity is not divisible by cp_size, or an unknown gate.
    """
    if gate not in ("seed", "wide"):
        raise ValueError(f"`gate` must be 'seed' or 'wide', got {gate!r}.")
    check_type("chunk", chunk, PrefillChunk)
    check_type("config", config, DSAConfig)
    capacity, (size,) = chunk.token_capacity, chunk.seq_lens.shape
    if capacity % check_int("cp_size", cp_size):
        raise ValueError(f"`cp_size` must divide token_capacity={capacity}, got {cp_size}.")
    live = lax.iota(jnp.int32, size) < chunk.num_reqs
    seq_lens, extend_lens = jnp.where(live, chunk.seq_lens, 0), jnp.where(live, chunk.extend_lens, 0)
    prefix_lens = seq_lens - extend_lens
    num_tokens = extend_lens.sum(dtype=jnp.int32)

    query_req, row, _ = spread_rows(extend_lens, capacity)
    query_pos = jnp.where(query_req >= 0, prefix_lens[query_req] + row, 0)

    gather_lens = jnp.minimum(seq_lens, extend_lens + config.swa_window - 1)
    first_pos = seq_lens - gather_lens
    swa_capacity = capacity + size * (config.swa_window - 1)
    swa = _region(
        gather_lens, swa_capacity, lambda req, row: chunk.swa_slots(req, first_pos[req] + row), extend_lens > 0
    )

    complete = (num_tokens <= capacity) & swa.complete
    compressed = {}
    for kind, ratio in LAYER_KINDS.items():
        if ratio not in chunk.page_tables:
            continue
        page_size, pages = config.compressed_page_size(kind), chunk.page_tables[ratio].shape[1]
        room = dict(chunk.entry_capacities).get(ratio, size * pages * page_size)

        def slots_of(req, entry, kind=kind, page_size=page_size):
            return chunk.compressed_slots(kind, page_size, req, entry)

        compressed[kind] = _region(seq_lens // ratio, room, slots_of, extend_lens > 0)
        complete &= compressed[kind].complete

    any_chunk = gate == "wide" or cp_size == 1
    sparse = num_tokens > 0 if any_chunk else sparse_prefill_predicate(chunk.num_reqs, num_tokens, cp_size=cp_size)
    return ChunkPlan(
        chunk=chunk,
        num_tokens=num_tokens,
        use_sparse=sparse & complete,
        overflow=~complete,
        query_pos=query_pos,
        query_req=query_req,
        swa=swa,
        swa_first_pos=first_pos,
        compressed=compressed,
        config=config,
        cp_size=cp_size,
    )
