"""DeepSeek-V4 sparse-attention prefill under round-robin context parallelism, in JAX."""

from dsa_cp_jax.attention import dsa_prefill_attention, dsa_prefill_attention_local
from dsa_cp_jax.chunk import ChunkPlan, PrefillChunk, WorkspaceRegion, make_plan
from dsa_cp_jax.chunk_check import validate_chunk
from dsa_cp_jax.config import DSAConfig
from dsa_cp_jax.gate import GateDecision, can_use_sparse_prefill, sparse_prefill_predicate
from dsa_cp_jax.kv_cache import KVPool, write_kv
from dsa_cp_jax.round_robin import merge_round_robin, query_start_loc, split_round_robin

__all__ = [
    "ChunkPlan",
    "DSAConfig",
    "GateDecision",
    "KVPool",
    "PrefillChunk",
    "WorkspaceRegion",
    "can_use_sparse_prefill",
    "dsa_prefill_attention",
    "dsa_prefill_attention_local",
    "make_plan",
    "merge_round_robin",
    "query_start_loc",
    "sparse_prefill_predicate",
    "split_round_robin",
    "validate_chunk",
    "write_kv",
]
