"""Sparse-MLA operations of DeepSeek-V4 prefill, as plain JAX and as Hopper kernels. A leaf: it knows no model."""

from pallas_kernels.attention_math import apply_attn_sink, merge_attention
from pallas_kernels.gather_dequant import gather_dequant, gather_workspace
from pallas_kernels.kv_layout import KVLayout
from pallas_kernels.kv_rows import quantize_pages, quantize_rows, write_records
from pallas_kernels.paged_mla import PagedMLAOutput, paged_mla_attention
from pallas_kernels.sparse_mla import SparseMLAOutput, sparse_mla_attention
from pallas_kernels.swa_combine import CombinedIndices, combine_swa_indices

__all__ = [
    "CombinedIndices",
    "KVLayout",
    "PagedMLAOutput",
    "SparseMLAOutput",
    "apply_attn_sink",
    "combine_swa_indices",
    "gather_dequant",
    "gather_workspace",
    "merge_attention",
    "paged_mla_attention",
    "quantize_pages",
    "quantize_rows",
    "sparse_mla_attention",
    "write_records",
]
