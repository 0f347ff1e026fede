"""validate_chunk: what `PrefillChunk.build` cannot see because it knows neither the pools nor the model."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from dsa_cp_jax.chunk import INT32_MAX, PrefillChunk
from dsa_cp_jax.config import LAYER_KINDS, DSAConfig, compress_ratio
from dsa_cp_jax.kv_cache import KVPool, check_pool
from pallas_kernels.common import cdiv, check_type


def validate_chunk(
    chunk: PrefillChunk, config: DSAConfig, swa_pool: KVPool, compressed_pools: Mapping[str, KVPool]
) -> None:
    """Checks on the host that every slot the chunk can touch is inside its pool. For debugging and before a first run.

    Args:
      chunk: from `PrefillChunk.build`.
      config: the model's DSAConfig.
      swa_pool: the SWA pool.
      compressed_pools: {"c4": pool, "c128": pool}, those that the model has.

    Raises:
      ValueError: the table without a slot for a position or entry, the page table or pool that is too small, a pool
        that is not as config says.
    """
    check_type("chunk", chunk, PrefillChunk)
    check_type("config", config, DSAConfig)
    check_type("compressed_pools", compressed_pools, Mapping)
    check_pool("swa_pool", swa_pool, config.swa_page_size, config.d_qk)
    for kind, pool in compressed_pools.items():
        if compress_ratio(kind) not in chunk.page_tables:
            raise ValueError(f"`compressed_pools` must have kinds that the chunk has page tables for, got {kind!r}.")
        check_pool(f"compressed_pools[{kind!r}]", pool, config.compressed_page_size(kind), config.d_qk)
    seq_lens, extend_lens = np.asarray(chunk.seq_lens), np.asarray(chunk.extend_lens)
    first_pos = seq_lens - np.minimum(seq_lens, extend_lens + config.swa_window - 1)
    for i in np.flatnonzero(extend_lens[: int(chunk.num_reqs)]):
        pos = jnp.arange(first_pos[i], seq_lens[i], dtype=jnp.int32)
        slots = np.asarray(chunk.swa_slots(jnp.full_like(pos, i), pos))
        if (slots < 0).any():
            raise ValueError(
                f"`full_to_swa` must give a slot to every position that the chunk sees; request {i} has none at "
                f"position {first_pos[i] + int((slots < 0).argmax())}."
            )
        if slots.max() >= swa_pool.num_slots:
            raise ValueError(
                f"`swa_pool` must hold the window of request {i}: slots {slots.min()}..{slots.max()} "
                f"({cdiv(int(slots.max()) + 1, swa_pool.page_size)} pages), got {swa_pool.num_slots} slots."
            )
        for kind, ratio in LAYER_KINDS.items():
            if ratio not in chunk.page_tables:
                continue
            table, pages = np.asarray(chunk.page_tables[ratio]), INT32_MAX
            needed = cdiv(int(seq_lens[i]) // ratio, config.compressed_page_size(kind))
            if needed > table.shape[1]:
                raise ValueError(
                    f"`page_tables[{ratio}]` must have {needed} pages for the {seq_lens[i]} tokens of request {i}, got "
                    f"{table.shape[1]}."
                )
            if kind in compressed_pools:
                pages = compressed_pools[kind].pages.shape[0]
            outside = (table[i, :needed] < 0) | (table[i, :needed] >= pages)
            if outside.any():
                j = int(outside.argmax())
                raise ValueError(
                    f"`page_tables[{ratio}][{i}, {j}]` must name a page in 0..{pages - 1} of the {kind} pool, got "
                    f"{table[i, j]}."
                )
